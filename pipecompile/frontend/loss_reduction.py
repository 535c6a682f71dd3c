"""How the losses of microbatches make up the loss of a step.

    mean        Σ samples · loss / Σ samples      loss_fn returns a mean over samples
    sum         Σ loss                            loss_fn returns a sum over samples
    weighted    Σ weight · loss / Σ weight        loss_fn returns (loss, weight), where the loss is
                                                  a mean over what the weight counts

A weighted loss is multiplied by its weight where it is computed, and its backward begins there. So
all else sums losses and gradients, and divides once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipecompile.errors import InputError

__all__ = [
    "LossReduction",
    "Weighed",
    "check_total_weight",
    "total_weight",
    "weigh",
    "weighed",
]

LossReduction = Literal["mean", "sum", "weighted"]


class Weighed(NamedTuple):
    """What comes with a loss that is multiplied by its weight: the weight in float64, and what else
    the loss function returned.
    """

    weight: Tensor
    extras: Any


def weighed(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the function that returns (weight · loss, Weighed) where `loss_fn` returns
    (loss, weight) or (loss, weight, anything).

    It raises InputError if `loss_fn` returns something else.
    """

    def weighed_loss(output: Any, target: Any) -> tuple[Tensor, Weighed]:
        returned = loss_fn(output, target)
        if not _has_weight(returned):
            raise InputError(
                f"loss_fn returned {_described(returned)}, but loss_reduction='weighted' needs "
                "(loss, weight) or (loss, weight, anything): beside the loss return how much it "
                "counts, as a number or a scalar tensor without gradient, such as "
                "(labels != -100).sum()"
            )
        # Means of 2 over 3 tokens and of 6 over 1 token: (3 · 2 + 1 · 6) / 4 = 3, where the mean
        # of the two losses would be 4. In float64, in which counts of tokens are exact.
        loss, number, *rest = returned
        weight = torch.as_tensor(number, dtype=torch.float64, device=loss.device)
        return weigh(loss, weight), Weighed(weight, rest[0] if rest else None)

    return weighed_loss


def weigh(value: Tensor, weight: Tensor) -> Tensor:
    """Return weight · value in float32 or wider; 0 where the weight is 0, since a mean over nothing
    is NaN.
    """
    # Half precision has no counts of tokens. The weight is not read: the host would have to wait
    # for its GPU in each microbatch.
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return torch.where(weight > 0, wide * weight.to(wide.dtype), torch.zeros_like(wide))


def total_weight(weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of weights in float64; it is NaN or infinite if one of them is no weight."""
    # A check of each weight would make the host wait for its GPU: one NaN makes the sum NaN,
    # which is read once a step.
    stacked = torch.stack(list(weights))
    return torch.where(stacked >= 0, stacked, torch.nan).sum()


def check_total_weight(total: float) -> None:
    """Raise InputError if a `total_weight` says that one of the weights is no weight."""
    if not isfinite(total):
        raise InputError(
            "loss_fn returned a weight that is negative or not finite; return how much the loss of "
            "a microbatch counts, such as the number of tokens that it is the mean over"
        )


def _has_weight(returned: Any) -> bool:
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        return False
    loss, weight, *_ = returned
    is_number = isinstance(weight, int | float) or (
        isinstance(weight, Tensor)
        and not (weight.dim() or weight.requires_grad or weight.is_complex())
    )
    return isinstance(loss, Tensor) and is_number


def _described(returned: Any) -> str:
    if not isinstance(returned, tuple):
        return f"a {type(returned).__name__}"
    return f"({', '.join(map(_described_part, returned))})"


def _described_part(part: Any) -> str:
    if not isinstance(part, Tensor):
        return f"a {type(part).__name__}"
    gradient = " with a gradient" if part.requires_grad else ""
    return f"a tensor of shape {tuple(part.shape)}{gradient}"
