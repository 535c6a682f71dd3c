"""Whether a captured model is the model: seeded steps of both, compared bit for bit.

It shares nothing with the self-check of the frontend, so that a mistake in one does not hide in the other.
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

from pipecompile.api.target import Target
from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments

from . import first

Run = Callable[[Arguments], Any]
Capturing = Callable[[nn.Module, Arguments], Callable[[Arguments], Run]]
"""Captures a model in its present mode for a call; what it returns makes a run for a call of any batch size."""

BATCHES = (4, 1, 2, 3, 7)  # captured at the first
MODES = ("train", "eval")


@dataclass(frozen=True)
class Step:
    """Everything that a training step can be seen by. Constants among the outputs are kept as they are.

    A parameter or buffer with several names is there under each; a parameter without a gradient is left out.
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
    """What differs between the model of `target` and its capture, by mode and batch; empty if nothing does.

    Each mode is captured by itself, at the first of the batches. Leaves the model in the last mode.
    """
    found = {}
    for mode in modes:
        target.model.train(mode == "train")
        prepare = capturing(target.model, first(batches[0], target.call))
        for batch in batches:
            call = first(batch, target.call)
            wanted = steps(target.model, call, lambda call: target.model(*call.args, **call.kwargs))
            found[f"{mode} at {batch}"] = differences(
                wanted, steps(target.model, call, prepare(call))
            )
    return {place: names for place, names in found.items() if names}


def by_pipecompile(model: nn.Module, call: Arguments) -> Callable[[Arguments], Run]:
    """Our capture, without its self-check."""
    captured = capture(model, call)

    def prepare(call: Arguments) -> Run:
        module = with_autograd_contexts(captured.instantiate(call))
        return lambda call: captured.outputs.unflatten(module(*captured.inputs.flatten(call)))

    return prepare


def steps(model: nn.Module, call: Arguments, run: Run, count: int = 2) -> list[Step]:
    """Seeded steps of `run` in a row, the first on the state of `model`, each on the buffers that the last one left.

    `model` is whose parameters and buffers `run` uses. It, its gradients and the random state stay as they were. The
    loss is a weighted sum of all outputs that carry a gradient, in eval mode too.
    """
    with _untouched(model), _seeded():
        return [_step(model, call, run) for _ in range(count)]


def _step(model: nn.Module, call: Arguments, run: Run) -> Step:
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
    return Step(
        outputs,
        gradients={name: _copied(p.grad) for name, p in parameters if p.grad is not None},
        buffers={name: _copied(b) for name, b in model.named_buffers(remove_duplicate=False)},
    )


def _loss(value: Tensor) -> Tensor:
    """Each element has a weight of its own, so that no exchange or sum of elements goes unseen."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).flatten().double()
    return (flat * torch.arange(flat.numel(), dtype=torch.double).add(1).cos()).sum()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Tensors and constants in nested mappings, sequences and dataclasses, with where they are."""
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
    """Seeds every generator that a forward may draw from; all are afterwards where they were."""
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
    """The block works on copies of all Python attributes; values and gradients of tensors are put back."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    values = [value for module in modules for value in vars(module).values()]
    whole = [
        value for value in values if isinstance(value, (fx.Graph, Tensor))
    ]  # cannot be copied, or need not be
    attributes = [dict(vars(module)) for module in modules]
    before = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    shared = {id(thing): thing for thing in (*modules, *tensors, *whole)}
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


def differences(wanted: Sequence[Step], got: Sequence[Step]) -> list[str]:
    """The names of what differs or is on one side alone, bit for bit, where NaN equals NaN."""
    return [
        f"{field.name} {name}" + (f" of step {index}" if index else "")
        for index, (left, right) in enumerate(zip(wanted, got, strict=True))
        for field in fields(Step)
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
