"""Gradients of a step: the sum over microbatches in their order, divided by their number M.

A microbatch that is smaller than planned counts as a part of one: with sizes 4, 4 and 2, M is 2.5.

Steps that accumulate leave their sums aside, undivided and only of this rank. The step that ends
them begins with these sums, so that ranks exchange gradients only once:

    step(…, accumulate=True)    aside  = Σ of its microbatches
    step(…, accumulate=True)    aside += Σ of its microbatches
    step(…)                     .grad += (aside + Σ of its microbatches), summed over ranks, / M
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.storages import is_irregular
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.shards import local_part

__all__ = ["StepGradients", "divide_gradients", "fresh_gradients", "spread_overflow"]


@contextmanager
def fresh_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Begin the block without gradients, and add what was there before afterwards.

    So gradients of earlier steps, which the user accumulates, are not divided a second time. If the
    block fails, the gradients from before are restored: a step happens as a whole or not at all.
    """
    with StepGradients().of_step(parameters, 1, accumulate=False):
        yield


class StepGradients:
    """What steps that accumulate have left aside, by parameter."""

    def __init__(self) -> None:
        self._aside: dict[Tensor, Tensor] = {}
        self._microbatches = 1.0
        self._lost = False

    @contextmanager
    def of_step(
        self, parameters: Iterable[Tensor], microbatches: float, *, accumulate: bool
    ) -> Iterator[None]:
        """Begin the block with what lies aside as the gradients.

        Afterwards they are put aside again if it is to `accumulate`, else added to the gradients
        from before. If the block fails, these are restored, and what lay aside is lost: InputError
        from then on, until `clear`.
        """
        if self._lost:
            raise InputError(
                "a step with accumulate=True before this one has failed, and its gradients are "
                "gone; call zero_grad() and repeat the minibatches since the last update"
            )
        parameters = list(parameters)  # an iterator could be read only once
        before = [parameter.grad for parameter in parameters]
        if any(gradient is not None and is_irregular(gradient) for gradient in before):
            raise InputError(
                "a parameter has a sparse gradient from before the step, which cannot be added to "
                "in place; call zero_grad() first"
            )
        had_some = bool(self._aside)
        for parameter in parameters:
            parameter.grad = self._pop(parameter, microbatches) if had_some else None
        try:
            yield
        except BaseException:
            _restore(parameters, before)
            self._lost = had_some
            raise
        if accumulate:
            self._microbatches = microbatches
            self._aside = {p: p.grad for p in parameters if p.grad is not None}
            _restore(parameters, before)
            return
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                own = parameter.grad
                parameter.grad = gradient if own is None else gradient.add_(own)

    def check_none_aside(self) -> None:
        """Raise InputError if the update that would take what lies aside is still to come."""
        if self._aside or self._lost:
            raise InputError(
                "steps with accumulate=True have put gradients aside, which a checkpoint does not "
                "hold; save it after the update"
            )

    def clear(self) -> None:
        """Forget what lies aside."""
        self._aside.clear()
        self._lost = False

    def _pop(self, parameter: Tensor, microbatches: float) -> Tensor | None:
        """Take out and return a sum, scaled so that dividing it by `microbatches` is right."""
        gradient = self._aside.pop(parameter, None)
        if gradient is not None and microbatches != self._microbatches:
            gradient.mul_(microbatches / self._microbatches)
        return gradient


def _restore(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def divide_gradients(parameters: Iterable[Tensor], count: float) -> None:
    """Divide the gradients by how many were summed, in place."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients and count != 1:
        with torch.no_grad():
            torch._foreach_div_(gradients, count)


def spread_overflow(gradients: Sequence[Tensor], scale: Tensor, deadline: Deadline) -> None:
    """Make the gradients of every process infinite if one has an infinity, or a NaN.

    A GradScaler looks at the gradients of its own rank. Without this, one rank would skip an update
    that others make, and the scales would go apart. InputError, on every process, if they have:
    `scale` is that of this one, on the device over which ranks reduce.
    """
    norm = torch.nn.utils.get_total_norm(gradients, torch.inf)
    overflow = (~norm.isfinite()).to(scale.device, torch.float32)
    told = torch.stack([overflow, scale.float(), -scale.float()])
    deadline.all_reduce(told, None, dist.ReduceOp.MAX)
    # The scaler waits for the device too, when it decides whether to skip.
    has_overflow, largest, smallest = told.tolist()
    if largest != -smallest:
        raise InputError(
            f"the scalers of ranks have other scales, from {-smallest:g} to {largest:g}: they were "
            "made otherwise, or gradients were changed after a step on one rank alone, whose "
            "scaler then skipped the update; make all alike, and change gradients on all ranks"
        )
    if has_overflow:
        for gradient in gradients:
            gradient.fill_(torch.inf)
