"""Training by steps, in the loop that asynchronous schedules are trained in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipecompile.training.batch_reader import input_and_target
from pipecompile.training.stage_optimizers import StageOptimizers

__all__ = ["train_by_steps"]


def train_by_steps(
    batches: Iterable[Any],
    optimizers: StageOptimizers,
    step: Callable[[Any, Any], Any],
    zero_grad: Callable[[], None],
    clip: Callable[[], object] | None,
) -> Iterator[Any]:
    """Yield what `step` returns for each pair of an input and a target, after the optimizers'.

    `clip` scales the gradients before they are used.
    """
    for item in batches:
        batch, target = input_and_target(item)
        zero_grad()
        loss = step(batch, target)
        if clip is not None:
            clip()
        optimizers.step()
        yield loss
