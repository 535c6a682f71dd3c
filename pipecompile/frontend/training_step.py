"""A seeded training step of a model or of its graph, after which all is as it was.

    restored_state        parameters, buffers, attributes and the random state are put back
        seed, forward     leave outputs
        backward          leaves gradients; those of the user are put aside meanwhile

The self-check compares such steps; other proofs only need what was there to be put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.foreign_leaves import foreign_leaves
from pipecompile.graph.attributes import attributes_restored
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.random_streams import seed_generators
from pipecompile.graph.restored_state import is_same_tensor, tensors_restored

__all__ = [
    "SEED",
    "TrainingStep",
    "fill_zeros",
    "gradients_of",
    "restored_state",
    "seed_everything",
    "training_step",
    "training_steps",
]

SEED = 602_214_076
"""The seed of all steps that are compared; no forward is likely to seed itself with it."""


@dataclass(frozen=True)
class TrainingStep:
    """All that a training step leaves, by name; `buffers` hold written parameters too.

    `foreign_leaves` are the other tensors that got gradients. `draws_in_backward` says whether the
    backward drew random numbers, and `writes_in_backward` whether it wrote to buffers. `written`
    are the names of the state that the step wrote to.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    foreign_leaves: tuple[Tensor, ...]
    draws_in_backward: bool
    writes_in_backward: bool
    written: tuple[str, ...]


def training_step(
    model: nn.Module, run: Callable[[], Any], *, fills_zeros: bool = False
) -> TrainingStep:
    """Return what one seeded step leaves, of which `run` is the forward; `model` is restored. It
    may begin with other values of parameters that are zero.
    """
    (step,) = training_steps(model, [run], fills_zeros=fills_zeros)
    return step


@torch.enable_grad()
def training_steps(
    model: nn.Module,
    forwards: Sequence[Callable[[], Any]],
    *,
    in_flight: bool = False,
    fills_zeros: bool = False,
) -> list[TrainingStep]:
    """Return what seeded steps with these `forwards` leave, as `training_step` does.

    Only the last step has buffers, and the names of the state that any of the steps wrote to. With
    `in_flight` all forwards come before the backwards.
    """
    steps: list[TrainingStep] = []
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with restored_state(model) as state_before, deterministic_kernels():
        before = {**state_before, **(fill_zeros(model) if fills_zeros else {})}
        waiting: list[Sequence[Tensor]] = []
        for index, run in enumerate(forwards):
            # Graph and model draw in the same order, so one global seed gives both the same.
            seed_generators(SEED + index)
            waiting.append(tensor_leaves(run()))
            if not in_flight:
                steps.append(_after_backward(model, trainable, waiting.pop()))
        steps += [_after_backward(model, trainable, outputs) for outputs in waiting]
        steps[-1] = _with_state(steps[-1], model, before)
    return steps


def _after_backward(
    model: nn.Module, trainable: Mapping[str, nn.Parameter], outputs: Sequence[Tensor]
) -> TrainingStep:
    """Run the backward of a forward with these `outputs`; return the step, without its buffers."""
    random_state = _random_state(model)
    buffers = [buffer.clone() for buffer in model.buffers()]
    foreign = foreign_leaves(model, outputs)
    gradients = _gradients(outputs, [*trainable.values(), *foreign])
    named = zip(trainable, gradients[: len(trainable)], strict=True)
    return TrainingStep(
        outputs={f"output {index}": value.detach() for index, value in enumerate(outputs)},
        gradients={name: gradient for name, gradient in named if gradient is not None},
        buffers={},
        foreign_leaves=foreign,
        draws_in_backward=not torch.equal(_random_state(model), random_state),
        writes_in_backward=not all(map(is_same_tensor, buffers, model.buffers())),
        written=(),
    )


def _with_state(
    step: TrainingStep, model: nn.Module, before: Mapping[Tensor, Tensor]
) -> TrainingStep:
    """Return `step` with the buffers and written parameters that it leaves in `model`, and with the
    names of those that are not as they were `before`.
    """

    def is_changed(value: Tensor) -> bool:
        # A buffer that the forward has replaced is another tensor.
        return value not in before or not is_same_tensor(value, before[value])

    buffers = dict(model.named_buffers())
    written = {name: value for name, value in model.named_parameters() if is_changed(value)}
    changed = [name for name, buffer in buffers.items() if is_changed(buffer)]
    state = {name: value.detach().clone() for name, value in (*buffers.items(), *written.items())}
    return replace(step, buffers=state, written=(*changed, *written))


def _random_state(model: nn.Module) -> Tensor:
    """Return the states of the generators of the CPU and of the model's GPUs together."""
    states = [torch.cuda.get_rng_state(device) for device in cuda_devices(model)]
    return torch.cat([torch.get_rng_state(), *states])


def _gradients(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of the loss, by a whole backward.

    `torch.autograd.grad` would not do: reentrant checkpoints, for example, only know `backward`.
    """
    differentiable = [value for value in outputs if value.requires_grad]
    if not differentiable:
        return [None] * len(parameters)
    return gradients_of(torch.stack(list(map(_weighted_sum, differentiable))).sum(), parameters)


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a loss; those of the user are put aside meanwhile."""
    gradients_before = [parameter.grad for parameter in parameters]
    # Hooks that run after a gradient is accumulated may step an optimizer, so they are taken away.
    hooks = [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in parameters]
    try:
        for parameter, own_hooks in zip(parameters, hooks, strict=True):
            parameter.grad = None
            if own_hooks:
                parameter._post_accumulate_grad_hooks.clear()
        loss.backward()
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient, own_hooks in zip(parameters, gradients_before, hooks, strict=True):
            parameter.grad = gradient
            if own_hooks:
                parameter._post_accumulate_grad_hooks.update(own_hooks)


def _weighted_sum(value: Tensor) -> Tensor:
    """Return a loss under which the elements of an output get different gradients, even if they are
    all zero, as behind a last layer that begins with zeros.
    """
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    # The gradient of a masked logit of minus infinity would be none, and spoil all others.
    finite = real.where(real.isfinite(), 0)
    weights = torch.arange(finite.numel(), device=finite.device).cos().view(finite.shape)
    # Sums of all outputs have one type, to be stacked.
    return (finite.square() + finite * weights.to(finite.dtype)).sum().float()


@torch.no_grad()
def fill_zeros(model: nn.Module) -> dict[Tensor, Tensor]:
    """Give parameters that are zero other values, and return these: behind a last layer that begins
    with zeros no output depends on anything, and no gradient comes through it.
    """
    generator, filled = torch.Generator(), dict[Tensor, Tensor]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            values = torch.empty(parameter.shape).normal_(std=0.02, generator=generator)
            parameter.copy_(values)
            filled[parameter] = parameter.detach().clone()
    return filled


def seed_everything() -> None:
    """Seed all generators that a forward or a loss may draw from."""
    seed_generators(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
    """Restore parameters, buffers, attributes and the random state after the block.

    Yield what each parameter and buffer was before. CaptureError if one has another shape then,
    which is restored too.
    """
    # All parameters: nothing shows that a forward writes to one through `.data` in a leaf module.
    state = (*model.buffers(), *model.parameters())
    with (
        torch.random.fork_rng(devices=cuda_devices(model)),
        attributes_restored(model),
        tensors_restored(model, state) as before,
    ):
        yield before
