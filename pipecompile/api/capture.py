"""A target's model as the graph of one microbatch, and how that came about."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain

import torch.utils._pytree as pytree
from torch import Tensor, fx

from pipecompile.api.costs import Captured
from pipecompile.api.target import Target
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture, captures
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.digest import digest
from pipecompile.frontend.self_check import Proof, proven
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.modules import belongs
from pipecompile.ir.plan import Options
from pipecompile.passes.contract import apply
from pipecompile.passes.group import Group
from pipecompile.runtime import world
from pipecompile.runtime.microbatch import split

__all__ = ["capture_target", "say"]


def capture_target(
    target: Target, options: Options, *, verify: bool, method: str | None = None
) -> Captured:
    """Captures the model at the size of the first microbatch; `verify` proves it by a training step.

    A model without values (on the meta device, of fake tensors) cannot be proven: its plan says so. With `method` it is
    captured that way, as another rank has proven it. What is special is said on standard error.
    """
    call = split((target.call.args, target.call.kwargs), options.microbatches)[0]
    if not target.has_values:
        call = pytree.tree_map_only(Tensor, target.on_device, call)
    sample = Arguments(*call)
    if verify and target.has_values:
        captured, module, proof = proven(target.model, sample, options.leaf)
        say(chain(_told(captured), [_proof_text(proof)]))
    else:
        proof = None
        captured = _by(method, target, sample, options)
        module = captured.instantiate(sample)
        say(_told(captured))
    _refuse_unknown_names(module.graph, options.groups)
    apply(module.graph, [Group(options.groups)])
    return Captured(captured, module, sample, digest(module), verified=proof is not None)


def _by(method: str | None, target: Target, sample: Arguments, options: Options) -> Capture:
    if method is None:
        return capture(target.model, sample, options.leaf)
    return next(
        each for each in captures(target.model, sample, options.leaf) if each.method == method
    )


def _told(captured: Capture) -> Iterator[str]:
    if captured.method != "recorded":
        yield f"captured another way than the first: {captured.method}"
    yield from map(str, captured.notes)


def _proof_text(proof: Proof) -> str:
    batches = " and ".join(map(str, proof.batches))
    return f"self-check: the graph is the model, bit for bit, at batches of {batches} ({proof.seconds:.1f} s)"


def say(lines: Iterable[str]) -> None:
    """Lines on standard error, once for all ranks."""
    for line in lines if world.rank() == 0 else ():
        print(line, file=sys.stderr)


def _refuse_unknown_names(graph: fx.Graph, groups: Iterable[Iterable[str]]) -> None:
    for name in (name for names in groups for name in names):
        if not any(belongs(node, name) for node in graph.nodes if node.op != "get_attr"):
            raise InputError(
                f"no node or module is called {name!r}; modules are named as in model.named_modules()"
            )
