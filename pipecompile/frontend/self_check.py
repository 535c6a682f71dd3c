"""Proof of a capture: seeded training steps of the graph against the original, compared bit for bit."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import captures
from pipecompile.frontend.captured_graph import Capture, batch_size
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.deviation import first_leaf, reader
from pipecompile.frontend.digest import digest
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.attributes import unchanged
from pipecompile.graph.storages import storage_key
from pipecompile.passes.autograd_context import EnterRegions
from pipecompile.passes.contract import apply

__all__ = ["Proof", "check_capture", "proven", "with_regions"]


class DifferenceError(CaptureError):
    """A graph is not the model; another way to capture it may give one that is."""


class ModelFailsError(CaptureError):
    """The model itself, not its graph, cannot take a training step."""


@dataclass(frozen=True)
class _Step:
    """Everything that a training step can be seen by."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]  # and parameters that the forward writes to


@dataclass(frozen=True)
class Proof:
    """At which batch sizes a capture was found equal to its model, and how long that took."""

    batches: tuple[int, ...]
    seconds: float


def proven(
    model: nn.Module, call: Arguments, leaf: Sequence[str] = ()
) -> tuple[Capture, fx.GraphModule, Proof]:
    """The best capture that is found to be the model: with its graph for `call`, and what was compared.

    Compared are a training step on `call` and one on another number of its samples, where the graph is for several.
    """
    differences: list[CaptureError] = []
    seen: set[str] = set()
    ways = captures(model, call, leaf)
    while True:
        try:
            found = next(ways)
            module = found.instantiate(call)
            if digest(module) in seen:
                continue
            seen.add(digest(module))
            start = time.perf_counter()
            batches = [_check_at(found, module, call), *_check_another(found, call)]
            return found, module, Proof(tuple(batches), time.perf_counter() - start)
        except StopIteration:  # no way is left; the first says best what is in the way
            raise differences[0] from None
        except (DifferenceError, UnsupportedError) as error:
            differences.append(error)


def _check_at(found: Capture, module: fx.GraphModule, call: Arguments) -> int:
    check_capture(found, module, call)
    return batch_size(found.inputs.flatten(call))


def _check_another(found: Capture, call: Arguments) -> Iterator[int]:
    """Checks a second batch size, where the guards know one."""
    batch = batch_size(found.inputs.flatten(call))
    others = [
        size
        for size in (batch // 2, batch - 1, batch + 1)
        if size and not found.guards.broken(size)
    ]
    if others and not found.guards.fixed:
        fewer = pytree.tree_map_only(
            Tensor, partial(_rows, size=others[0]), (call.args, call.kwargs)
        )
        other = Arguments(*fewer)
        with suppress(ModelFailsError):  # it is for some sizes only: then this one will not run
            yield _check_at(found, found.instantiate(other), other)


def _rows(tensor: Tensor, size: int) -> Tensor:
    """The first `size` samples; the first ones again where there are fewer."""
    return tensor[torch.arange(size) % tensor.shape[0]] if tensor.dim() else tensor


def check_capture(capture: Capture, module: fx.GraphModule, call: Arguments) -> None:
    """Raises CaptureError, naming what differs, unless `module` does exactly what the original does.

    The step's loss is the sum of squares of all outputs that carry gradients. Parameters, buffers, gradients and the
    random state are as before afterwards.
    """
    model, runnable, written = capture.model, with_regions(module), _written_parameters(module)
    original = _original(model, written, call)
    _refuse_sparse(original.gradients)
    captured = _step(model, written, lambda: runnable(*capture.inputs.flatten(call)))
    for kind in ("outputs", "gradients", "buffers"):
        name = _different(getattr(original, kind), getattr(captured, kind))
        if name is not None:
            where = _where(capture, runnable, written, call, kind, name)
            raise DifferenceError(
                f"the captured graph is not the model: {kind} differ in {name!r} for the same seed{where}; the model "
                "may keep state outside its buffers, or branch on something that was not recorded: keep it in a "
                "buffer, or make that module one node (leaf)"
            )


def _where(
    capture: Capture,
    module: fx.GraphModule,
    written: Sequence[Tensor],
    call: Arguments,
    kind: str,
    name: str,
) -> str:
    """The module and the line at which the difference is first seen, as part of a sentence."""
    if kind == "outputs":
        with _untouched(capture.model, written):
            node = first_leaf(capture.model, module, capture.inputs.flatten(call), call, _same)
    else:
        node = reader(module, name)
    if node is None:
        node = next(
            each for each in reversed(module.graph.nodes) if each.op not in ("output", "get_attr")
        )
    path = node.meta.get("module") or "the model's forward"
    return (
        f", first seen in {path} ({node.meta['source']})"
        if node.meta.get("source")
        else f", first seen in {path}"
    )


def _original(model: nn.Module, written: Sequence[Tensor], call: Arguments) -> _Step:
    try:
        step = _step(model, written, lambda: model(*call.args, **call.kwargs))
    except Exception as error:
        raise ModelFailsError(
            f"a training step of the model itself fails on the sample input: {error}; if it is only to be evaluated, "
            "leave the self-check out (self_check=False)"
        ) from error
    if any(isinstance(value, FakeTensor) for value in step.outputs.values()):
        raise CaptureError(
            "the model keeps tensors where no module shows them (a cache in a global or a closure), and now those of "
            "its recording; keep them in buffers, and make the model anew"
        )
    return step


def with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that enters the regions of the model: only then is it what the stages will run."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    apply(graph, [EnterRegions()])
    return fx.GraphModule(module, graph)


def _refuse_sparse(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name} is sparse, which stages cannot sum or hand on; make it dense (sparse=False)"
            )


def _different(original: dict[str, Tensor], captured: dict[str, Tensor]) -> str | None:
    """The first name under which there is not the same."""
    for name in [*original, *(captured.keys() - original.keys())]:
        if (
            name not in original
            or name not in captured
            or not _same(original[name], captured[name])
        ):
            return name
    return None


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(
        ((left == right) | (left.isnan() & right.isnan())).all()
    )


@torch.enable_grad()
def _step(model: nn.Module, written: Sequence[Tensor], run: Callable[[], Any]) -> _Step:
    """One step that `run` begins, on the state of `model`; `written` are parameters that it writes to."""
    with _untouched(model, written):
        torch.manual_seed(0)
        outputs = [leaf for leaf in pytree.tree_leaves(run()) if isinstance(leaf, Tensor)]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = _gradients(outputs, [p for _, p in named])
        return _Step(
            outputs={f"output {index}": value.detach() for index, value in enumerate(outputs)},
            gradients={
                name: g for (name, _), g in zip(named, gradients, strict=True) if g is not None
            },
            buffers={
                name: value.clone()
                for name, value in (*model.named_buffers(), *_named(model, written))
            },
        )


def _gradients(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of a fixed loss, by a whole backward: parts of models, as reentrant checkpoints, know no other."""
    differentiable = [value for value in outputs if value.requires_grad]
    held = [parameter.grad for parameter in parameters]
    hooks = [
        dict(parameter._post_accumulate_grad_hooks or {}) for parameter in parameters
    ]  # they may take a step
    try:
        for parameter, own in zip(parameters, hooks, strict=True):
            parameter.grad = None
            if own:
                parameter._post_accumulate_grad_hooks.clear()
        if differentiable:
            torch.stack(
                [value.abs().square().sum().float() for value in differentiable]
            ).sum().backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient, own in zip(parameters, held, hooks, strict=True):
            parameter.grad = gradient
            if own:
                parameter._post_accumulate_grad_hooks.update(own)


def _written_parameters(module: fx.GraphModule) -> list[Tensor]:
    """The parameters that a forward of `module` may write to: an embedding that keeps its norms, for example."""
    written = {
        storage_key(tensor) for node in module.graph.nodes for tensor in node.meta["mutates"]
    }
    found: list[Tensor] = []
    for node in module.graph.nodes:
        if node.op == "call_module" and node.meta["mutates"]:
            found.extend(module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr" and storage_key(node.meta["val"]) in written:
            found.append(operator.attrgetter(str(node.target))(module))
    return [value for value in found if isinstance(value, nn.Parameter)]


def _named(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    known = {id(tensor) for tensor in tensors}
    return (
        (name, parameter) for name, parameter in model.named_parameters() if id(parameter) in known
    )


@contextmanager
def _untouched(model: nn.Module, written: Sequence[Tensor]) -> Iterator[None]:
    """Buffers, `written`, attributes and random state are afterwards what they were before."""
    buffers = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *written)]
    with torch.random.fork_rng(devices=cuda_devices(model)), unchanged(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
