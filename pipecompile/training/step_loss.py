"""The loss of a step, made of those of the microbatches of all replicas, and what its gradients are
divided by.

With weights, no rank knows the divisor before the loss function has run. The ranks with the last
stage tell it to all at the end of the step, when gradients are summed:

    rank 0    0F0 0F1 … 0B0 0B1 ── sums ── Σ weight ── divide
    rank 1        1F0 1B0 1F1 1B1 ─ sums ── Σ weight ── divide
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from pipecompile.errors import InputError
from pipecompile.frontend.loss_reduction import (
    LossReduction,
    Weighed,
    check_total_weight,
    total_weight,
    weigh,
)
from pipecompile.frontend.microbatch import MicrobatchSizes, is_count
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.rank_step import StepResult
from pipecompile.runtime.replicas import mean_over_replicas
from pipecompile.training.loss_extras import LossExtras
from pipecompile.training.runner import Runner

__all__ = ["StepLoss"]

FIRST_STEPS = 2
"""In which replicas compare whether something comes with the loss."""


class StepLoss:
    """What a `reduction` makes of the losses of microbatches, and of their gradients."""

    def __init__(self, reduction: LossReduction, place: RankPlace, runner: Runner) -> None:
        self._reduction = reduction
        self._place = place
        self._runner = runner
        self._weight_aside = 0.0
        self._joined = 0

    @property
    def flags(self) -> dict[str, bool]:
        """What all ranks must give alike: with weights they exchange something more."""
        known = get_args(LossReduction)
        return {f"loss_reduction={name!r}": name == self._reduction for name in known}

    def gradients(self, sizes: MicrobatchSizes, scaler: GradScaler | None) -> list[Tensor | None]:
        """Return what the backward of each microbatch begins with, None for 1."""
        is_scaled = scaler is not None and scaler.is_enabled()
        is_weighed = self._reduction == "mean" and sizes.remainder is not None
        if not is_scaled and not is_weighed:
            return [None] * len(sizes.sizes)
        one = torch.ones((), device=self._runner.device)
        # Every rank asks the scaler, since it makes its scale when it is first asked.
        scale = scaler.scale(one) if scaler is not None and is_scaled else None
        gradients: list[Tensor | None] = [scale] * len(sizes.sizes)
        if is_weighed:
            # In float64, because autograd casts it to the type of the loss.
            weight = sizes.weight(len(gradients) - 1)
            gradients[-1] = (one if scale is None else scale).double() * weight
        return gradients

    def count(self, sizes: MicrobatchSizes) -> float:
        """Return how many microbatches of the planned size gradients become the mean over; 1 where
        they do not.
        """
        # A minibatch of two microbatches and a half weighs that much.
        return sizes.planned_microbatches if self._reduction == "mean" else 1.0

    def divisor(
        self, result: StepResult | None, sizes: MicrobatchSizes, *, accumulate: bool
    ) -> float:
        """Return what the sum of gradients over all replicas is divided by, which with weights is
        told to all ranks.

        InputError, on all of them, if a weight is none, or if a step that does not `accumulate` has
        only weights of 0.
        """
        if self._reduction == "sum":
            return 1.0
        if self._reduction == "mean":
            return self.count(sizes) * self._place.replicas
        total = self._weight_aside + self._exchanged_weight(result)
        if not total and not accumulate:
            raise InputError(
                "the weights that loss_fn returned in this step are all 0, so that nothing counts "
                "and gradients would be NaN; leave such a minibatch out on all ranks"
            )
        return total

    def put_aside(self, divisor: float) -> None:
        """Keep the divisor of gradients that are put aside, for the step that ends them."""
        self._weight_aside = divisor

    def clear(self) -> None:
        """Forget what lies aside."""
        self._weight_aside = 0.0

    def joined(self, result: StepResult | None, sizes: MicrobatchSizes) -> Any:
        """Return the loss of a step or evaluation of all replicas, or the pair of that and of what
        came with it; None without the last stage.

        Scalars that came with it are joined like losses, but counts are summed; tensors are those
        of this replica.
        """
        if result is None:
            return None
        losses, extras = [values[0] for values in result.values], result.extras
        scalar: Callable[[Sequence[Tensor]], Tensor] = partial(self._mean, sizes)
        if self._reduction == "sum":
            scalar = self._sum
        if self._reduction == "weighted":
            weights = _weights(result)
            extras = [each.extras for each in extras]
            scalar = partial(self._weighted_mean, weights)
            loss = self._quotient(losses, weights)  # they are multiplied already
        else:
            loss = scalar(losses)
        group, has_extras = self._place.replica_group, any(each is not None for each in extras)
        # Replicas that return a loss alone need no exchange more in each step.
        self._joined += 1
        if not has_extras and (group is None or self._joined > FIRST_STEPS):
            return loss
        merged = LossExtras.of_replicas(extras, partial(self._runner.tell, group))
        return (loss, merged.joined(self._sum, scalar)) if has_extras else loss

    def _exchanged_weight(self, result: StepResult | None) -> float:
        """Return the sum of the weights of this step over all replicas, on every rank."""
        own = torch.zeros((), dtype=torch.float64, device=self._runner.device)
        # Of pipelines that are given the same data, one says what it weighs.
        alike = len(self._place.pipelines) // self._place.replicas
        if result is not None and self._place.pipeline % alike == 0:
            own += total_weight(_weights(result))
        if self._place.is_distributed:
            self._runner.deadline.all_reduce(own, None)
        total = own.item()
        check_total_weight(total)
        return total

    def _mean(self, sizes: MicrobatchSizes, values: Sequence[Tensor]) -> Tensor:
        own, group = sizes.mean(values), self._place.replica_group
        if group is None:
            return own
        own = own.to(self._runner.device)  # loss_fn may have moved a metric to the host
        return mean_over_replicas(own, sizes.samples, group, self._runner.deadline)

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        return self._over_replicas(torch.stack(list(values)).sum())

    def _weighted_mean(self, weights: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        pairs = zip(values, weights, strict=True)
        return self._quotient([weigh(value, weight) for value, weight in pairs], weights)

    def _quotient(self, weighed: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Return Σ weight · value / Σ weight in the type of the products."""
        total = torch.stack([torch.stack(list(weighed)).double().sum(), total_weight(weights)])
        total = self._over_replicas(total)
        check_total_weight(total[1].item())
        return (total[0] / total[1]).to(weighed[0].dtype)

    def _over_replicas(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, in which it may be summed, over replicas."""
        if self._place.replica_group is None:
            return value
        # A metric may be of another type on each replica; sums of whole numbers are not.
        wide = torch.int64 if is_count(value) else torch.promote_types(value.dtype, torch.float64)
        total = value.to(self._runner.device, wide)
        self._runner.deadline.all_reduce(total, self._place.replica_group)
        return total.to(value.dtype)


def _weights(result: StepResult) -> list[Tensor]:
    """Return the weight of each microbatch."""
    weighed: Sequence[Weighed] = result.extras
    return [each.weight for each in weighed]
