"""Is the loss what `loss_reduction` says? A loss of several microbatches tells:

    mean    loss of (a, b) = (loss of a + loss of b) / 2
    sum     loss of (a, b) =  loss of a + loss of b

A sum that is taken for a mean gives 1/M of the unsplit model's gradients, and a mean that is taken
for a sum M times them. A loss may also be neither, such as a mean over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import Any

from torch import nn

from pipecompile.frontend.batch_counts import value_of_loss
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target, sum_of_squares
from pipecompile.frontend.training_step import restored_state

__all__ = ["other_reduction", "other_reduction_of"]

TOLERANCE = 1e-3  # of the loss, which may be in half precision


def other_reduction_of(target: Target, microbatches: int) -> str | None:
    """Return what to say if the loss of a minibatch, cut into so many microbatches, is a sum and
    `loss_reduction` a mean, or the other way round.
    """

    def loss(given: tuple[Arguments, Any]) -> Any:
        call, wanted = given
        return target.tried_loss(target.model(*call.args, **call.kwargs), wanted)

    calls, targets = target.microbatches(microbatches), target.cut_targets(microbatches)
    with restored_state(target.model), restored_state(target.loss_module or nn.Identity()):
        # Dropout would give two losses for the same data.
        for module in target.model.modules():
            module.training = False
        together = value_of_loss(loss, target.beginning(2, microbatches))
        parts = [value_of_loss(loss, each) for each in zip(calls[:2], targets[:2], strict=True)]
    return other_reduction(target, together, parts)


def other_reduction(
    target: Target, together: float | None, parts: Sequence[float | None]
) -> str | None:
    """Return what to say if what the loss is `together` shows that it is of another reduction than
    `loss_reduction`, for its equal `parts`; None is a loss that has failed.
    """
    # Which stands for a loss where a user has given none.
    if target.loss_fn is sum_of_squares:
        return None
    reduction: LossReduction = target.loss_reduction
    losses = [each for each in parts if each is not None]
    if together is None or len(losses) < max(len(parts), 2):
        return None
    # A mean over labelled samples alone may be 0 where a part has none, and look like a sum.
    if not all(losses):
        return None
    total = sum(losses)
    is_sum = isclose(together, total, rel_tol=TOLERANCE)
    is_mean = isclose(together, total / len(losses), rel_tol=TOLERANCE)
    seen = f"it is {together:.6g} for {len(losses)} equal parts of a batch together, and they have "
    if reduction == "mean" and is_sum and not is_mean:
        return (
            f"the loss is a sum over samples: {seen}{total:.6g} in all. With loss_reduction='mean' "
            "gradients are those of the unsplit model divided by the number of microbatches; "
            "loss_reduction='sum' has those of the unsplit model (if the model returns its loss, "
            "with loss_fn=lambda output, target: output.loss)"
        )
    if reduction == "sum" and is_mean and not is_sum:
        return (
            f"the loss is a mean over samples: {seen}a mean of {total / len(losses):.6g}. With "
            "loss_reduction='sum' gradients are those of the unsplit model times the number of "
            "microbatches; without loss_reduction they are those of the unsplit model"
        )
    return None
