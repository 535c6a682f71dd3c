"""How other tools capture a model, for `benchmarks.capture`.

Each function returns a module whose parameters have the model's own names, and how to run it.
"""

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
from tests.zoo.judge import StepResult, differences, steps

CONTAINERS = (nn.ModuleList, nn.Sequential)
SPLITS = 3  # places at which a pipeline is split by trial before the model counts as refused


@dataclass(frozen=True)
class Rival:
    """A captured model.

    Its parameters and buffers have the model's names, after a prefix if it has stages.
    """

    module: nn.Module
    run: Callable[[Arguments], Any]


def capture_by_export(model: nn.Module, call: Arguments) -> Rival:
    """Return the capture of torch.export, with a batch size that is as open as it can keep it."""
    arguments = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    shapes = pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.AUTO} if _is_batched(leaf) else None, arguments
    )
    program = torch.export.export(
        model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False
    )
    module = program.module()
    return Rival(module, lambda call: module(*call.args, **call.kwargs))


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def capture_by_tracing(model: nn.Module, call: Arguments) -> Rival:
    """Return the capture of torch.fx.symbolic_trace.

    Where it fails it is tried with the defaults of all arguments that the call does not pass.
    """
    signature = inspect.signature(model.forward)
    passed = signature.bind(*call.args, **call.kwargs).arguments
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in passed and parameter.kind not in variadic
    }
    try:
        module = fx.symbolic_trace(model)
    except Exception:
        module = fx.symbolic_trace(model, concrete_args=defaults)
    return Rival(module, lambda call: module(*call.args, **call.kwargs))


def capture_by_pipelining(model: nn.Module, call: Arguments) -> Rival:
    """Return the capture of torch.distributed.pipelining.pipeline, split at one module.

    Its stages run one after another in this process. It splits at each call of the module, so there
    may be more than two stages.
    """
    error: Exception = RuntimeError("it has no module to split at")
    for place in _places(model):
        try:
            # It leaves marks in the model that it splits, hence the copy.
            spec = {place: SplitPoint.BEGINNING}
            pipe = pipeline(copy.deepcopy(model), call.args, call.kwargs, split_spec=spec)
            if pipe.num_stages > 1:
                return _in_sequence(pipe.split_gm)
            error = RuntimeError(f"split at {place}, it has one stage")
        except Exception as refusal:
            error = refusal
    raise error


def _in_sequence(stages: fx.GraphModule) -> Rival:
    # The pipe itself would detach the tensors that pass from one stage to the next.
    interpreter = fx.Interpreter(stages)
    return Rival(
        stages, lambda call: interpreter.run(*pytree.tree_leaves((call.args, call.kwargs)))
    )


def _places(model: nn.Module) -> list[str]:
    """Return paths of modules to split at: the middle blocks of the longest containers."""
    containers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, CONTAINERS)
    ]
    longest = sorted(containers, key=lambda container: -len(list(container[1].children())))
    places = []
    for path, module in (*longest, ("", model)):
        names = [name for name, _ in module.named_children()]
        if len(names) > 1:
            places.append(f"{path}.{names[len(names) // 2]}".lstrip("."))
    return places[:SPLITS]


RIVALS: dict[str, Callable[[nn.Module, Arguments], Rival]] = {
    "torch.export": capture_by_export,
    "fx.symbolic_trace": capture_by_tracing,
    "pipelining.pipeline": capture_by_pipelining,
}


def differences_of_rival(model: nn.Module, rival: Rival, call: Arguments) -> list[str]:
    """Return the names of what differs between two steps of `model` and of `rival`.

    Rivals are judged more leniently than pipecompile: their outputs count as a flat list of
    tensors, a tied parameter needs only one of its names, and a buffer that the model does not
    update may be missing.
    """
    wanted = steps(model, call, lambda call: _flat(model(*call.args, **call.kwargs)))
    got = steps(rival.module, call, lambda call: _flat(rival.run(call)))
    return differences(wanted, [_under_names_of(model, step) for step in got])


def _flat(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _under_names_of(model: nn.Module, step: StepResult) -> StepResult:
    """Return `step` with the missing buffers, and each tensor under all its names in `model`."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A buffer that the capture dropped counts with the value that the model has now.
    values = {name: value.detach() for name, value in buffers.items()}
    for name, value in _completed(step.buffers, buffers).items():
        if name in buffers:
            values[name] = value
    return replace(step, gradients=_completed(step.gradients, parameters), buffers=values)


def _completed(values: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` without prefixes of stages, and under all names of each tensor in `state`."""
    plain = {re.sub(r"^submod_pp_\d+\.", "", name): value for name, value in values.items()}
    return plain | {
        name: plain[other]
        for name, tensor in state.items()
        if name not in plain
        for other in _aliases(tensor, state)
        if other in plain
    }


def _aliases(tensor: Tensor, state: dict[str, Tensor]) -> Iterator[str]:
    return (name for name, other in state.items() if other is tensor)
