"""Whether a captured model is the model: seeded steps of both, compared bit for bit.

It shares no code with the self-check of the frontend, so that a mistake in one does not hide in
the other.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target

from . import first

Run = Callable[[Arguments], Any]
Capturing = Callable[[nn.Module, Arguments], Callable[[Arguments], Run]]
"""Captures a model in its present mode; what it returns prepares a run for a call of any size."""

BATCHES = (4, 1, 2, 3, 7)  # captured at the first
MODES = ("train", "eval")


@dataclass(frozen=True)
class StepResult:
    """Everything that can be observed of a training step.

    A parameter or buffer is listed under all of its names; one without a gradient is left out.
    Constants among the outputs are kept as they are.
    """

    outputs: dict[str, Any]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def verdict(
    capturing: Capturing,
    target: Target,
    batches: Sequence[int] = BATCHES,
    modes: Sequence[str] = MODES,
) -> dict[str, list[str]]:
    """Return what differs between a model and its capture, by mode and batch; empty if nothing.

    Each mode is captured by itself, at the first of the batches. The model stays in the last mode.
    """
    differing = {}
    for mode in modes:
        target.model.train(mode == "train")
        prepare = capturing(target.model, first(batches[0], target.call))
        for batch in batches:
            call = first(batch, target.call)
            wanted = steps(target.model, call, lambda call: target.model(*call.args, **call.kwargs))
            differing[f"{mode} at {batch}"] = differences(
                wanted, steps(target.model, call, prepare(call))
            )
    return {place: names for place, names in differing.items() if names}


def by_pipecompile(model: nn.Module, call: Arguments) -> Callable[[Arguments], Run]:
    """Return pipecompile's capture, without its self-check."""
    captured = capture(model, call)

    def prepare(call: Arguments) -> Run:
        module = with_autograd_contexts(captured.instantiate(call))
        return lambda call: captured.outputs.unflatten(module(*captured.inputs.flatten(call)))

    return prepare


def steps(model: nn.Module, call: Arguments, run: Run, count: int = 2) -> list[StepResult]:
    """Return the results of `count` seeded steps of `run`, which uses the parameters of `model`.

    Each step begins with the buffers that the last one left. Afterwards the model, its gradients
    and the random state are as before. The loss is a weighted sum of all outputs that carry a
    gradient, in eval mode too.
    """
    with _untouched(model), _seeded():
        return [_step(model, call, run) for _ in range(count)]


def _step(model: nn.Module, call: Arguments, run: Run) -> StepResult:
    for parameter in model.parameters():
        parameter.grad = None
    results = dict(_leaves(run(call)))
    outputs = {name: _copied(value) for name, value in results.items()}
    losses = [
        _loss(value)
        for value in results.values()
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()
    parameters = model.named_parameters(remove_duplicate=False)
    return StepResult(
        outputs,
        gradients={name: _copied(p.grad) for name, p in parameters if p.grad is not None},
        buffers={name: _copied(b) for name, b in model.named_buffers(remove_duplicate=False)},
    )


def _loss(value: Tensor) -> Tensor:
    # Each element has a weight of its own, so that exchanged or summed elements are noticed.
    flat = (torch.view_as_real(value) if value.is_complex() else value).flatten().double()
    return (flat * torch.arange(flat.numel(), dtype=torch.double).add(1).cos()).sum()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested mappings, sequences and dataclasses."""
    if isinstance(value, Mapping):
        items = [(repr(key), item) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}[{key}]")


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed every generator that a forward may draw from; restore all of them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Give the block copies of all Python attributes; restore tensors and gradients afterwards."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    values = [value for module in modules for value in vars(module).values()]
    # Graphs cannot be copied, and tensors need not be.
    uncopied = [value for value in values if isinstance(value, (fx.Graph, Tensor))]
    attributes = [dict(vars(module)) for module in modules]
    before = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    shared = {id(thing): thing for thing in (*modules, *tensors, *uncopied)}
    _set_attributes(modules, copy.deepcopy(attributes, shared))
    try:
        yield
    finally:
        _set_attributes(modules, attributes)
        for tensor, value, gradient in before:
            tensor.grad = gradient
            tensor.data.copy_(value)


def _set_attributes(modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
    for module, values in zip(modules, attributes, strict=True):
        vars(module).clear()
        vars(module).update(values)


def differences(wanted: Sequence[StepResult], got: Sequence[StepResult]) -> list[str]:
    """Return the names of values that are not equal bit for bit, or exist on one side only.

    NaN equals NaN.
    """
    return [
        f"{field.name} {name}" + (f" of step {index}" if index else "")
        for index, (left, right) in enumerate(zip(wanted, got, strict=True))
        for field in fields(StepResult)
        for name in _differing(getattr(left, field.name), getattr(right, field.name))
    ]


def _differing(wanted: dict[str, Any], got: dict[str, Any]) -> list[str]:
    names = dict.fromkeys((*wanted, *got))
    return [n for n in names if n not in wanted or n not in got or not _same(wanted[n], got[n])]


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.isclose(left, right, rtol=0, atol=0, equal_nan=True).all())
