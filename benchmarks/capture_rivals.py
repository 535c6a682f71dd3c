"""How others capture a model: each gives a module under the model's own names, and how to run it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: TID251

from pipecompile.frontend.signature import Arguments
from tests.zoo.judge import Step, differences, steps

CONTAINERS = (nn.ModuleList, nn.Sequential)
SPLITS = 3  # places where a pipeline is tried to be split, before it counts as refused


@dataclass(frozen=True)
class Rival:
    """A captured model. Its parameters and buffers have the model's names, after a prefix where it has stages."""

    module: nn.Module
    run: Callable[[Arguments], Any]


def exported(model: nn.Module, call: Arguments) -> Rival:
    """torch.export in its default way, with a batch that stays open as far as it finds it to."""
    given = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    shapes = pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.AUTO} if _is_batched(leaf) else None, given
    )
    program = torch.export.export(
        model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False
    )
    module = program.module()
    return Rival(module, lambda call: module(*call.args, **call.kwargs))


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def traced(model: nn.Module, call: Arguments) -> Rival:
    """torch.fx.symbolic_trace; where it fails, it is told the defaults of arguments that are not given."""
    signature = inspect.signature(model.forward)
    given = signature.bind(*call.args, **call.kwargs).arguments
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    absent = {
        n: p.default
        for n, p in signature.parameters.items()
        if n not in given and p.kind not in kinds
    }
    try:
        module = fx.symbolic_trace(model)
    except Exception:
        module = fx.symbolic_trace(model, concrete_args=absent)
    return Rival(module, lambda call: module(*call.args, **call.kwargs))


def pipelined(model: nn.Module, call: Arguments) -> Rival:
    """torch.distributed.pipelining.pipeline, split at one module; the stages run one after the other in this process.

    It splits at each call of the module, so that there may be more than two stages.
    """
    error: Exception = RuntimeError("it has no module to split at")
    for place in _places(model):
        try:
            # It leaves marks in the model that it splits.
            spec = {place: SplitPoint.BEGINNING}
            pipe = pipeline(copy.deepcopy(model), call.args, call.kwargs, split_spec=spec)
            if pipe.num_stages > 1:
                return _one_after_the_other(pipe.split_gm)
            error = RuntimeError(f"split at {place}, it has one stage")
        except Exception as refusal:
            error = refusal
    raise error


def _one_after_the_other(stages: fx.GraphModule) -> Rival:
    """Runs the stages; the pipe itself would detach what goes from one to the next."""
    interpreter = fx.Interpreter(stages)
    return Rival(
        stages, lambda call: interpreter.run(*pytree.tree_leaves((call.args, call.kwargs)))
    )


def _places(model: nn.Module) -> list[str]:
    """The middle blocks of the longest containers, or of the model itself."""
    containers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, CONTAINERS)
    ]
    longest = sorted(containers, key=lambda container: -len(list(container[1].children())))
    found = []
    for path, module in (*longest, ("", model)):
        names = [name for name, _ in module.named_children()]
        if len(names) > 1:
            found.append(f"{path}.{names[len(names) // 2]}".lstrip("."))
    return found[:SPLITS]


RIVALS: dict[str, Callable[[nn.Module, Arguments], Rival]] = {
    "torch.export": exported,
    "fx.symbolic_trace": traced,
    "pipelining.pipeline": pipelined,
}


def judged(model: nn.Module, rival: Rival, call: Arguments) -> list[str]:
    """What differs in two steps. More lenient than with ours: the outputs are taken as a flat list of tensors.

    Names that a rival dropped count where their tensors matter: a tied parameter needs only one of its names, and a
    buffer that the model does not update none.
    """
    wanted = steps(model, call, lambda call: _flat(model(*call.args, **call.kwargs)))
    got = steps(rival.module, call, lambda call: _flat(rival.run(call)))
    return differences(wanted, [_under_names_of(model, step) for step in got])


def _flat(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _under_names_of(model: nn.Module, step: Step) -> Step:
    """`step` with all names of each tensor of `model`, and with the buffers that the captured module does not have."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return replace(
        step,
        gradients=_completed(step.gradients, dict(model.named_parameters(remove_duplicate=False))),
        buffers={name: value.detach() for name, value in buffers.items()}
        | {
            name: value
            for name, value in _completed(step.buffers, buffers).items()
            if name in buffers
        },
    )


def _completed(found: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`found` without prefixes of stages, and under those names, too, that `state` has for the same tensors."""
    plain = {re.sub(r"^submod_pp_\d+\.", "", name): value for name, value in found.items()}
    return plain | {
        name: plain[other]
        for name, tensor in state.items()
        if name not in plain
        for other in _aliases(tensor, state)
        if other in plain
    }


def _aliases(tensor: Tensor, state: dict[str, Tensor]) -> Iterator[str]:
    return (name for name, other in state.items() if other is tensor)
