"""Training by steps, in the loop that asynchronous schedules are trained in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from pipecompile.runtime.norm import NormOnItsWay
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.training.batch_reader import input_and_target
from pipecompile.training.stage_optimizers import StageOptimizers

__all__ = ["PipelineSteps", "train_by_steps"]


class PipelineSteps(NamedTuple):
    """What a pipeline gives to a loop of steps.

    `step(batch, target, validate, rule)` steps; a `validate` makes the weights right after the
    leading forwards (runtime/leading_forwards.py), and ranks compare their `rule`. `gradients()`
    are those of this process, and the norm is that of all ranks, which they `begin_norm` together.
    Exchanges outside of a step are `watched`.
    """

    step: Callable[[Any, Any, Callable[[], bool] | None, UpdateRule], Any]
    zero_grad: Callable[[], None]
    gradients: Callable[[], Sequence[Tensor]]
    begin_norm: Callable[[], NormOnItsWay]
    wait_for_norm: Callable[[NormOnItsWay], Tensor]
    watched: Callable[[], AbstractContextManager[None]]


def train_by_steps(
    batches: Iterable[Any], optimizers: StageOptimizers, steps: PipelineSteps, rule: UpdateRule
) -> Iterator[Any]:
    """Yield what a step returns for each pair of an input and a target, after its update."""
    for item in batches:
        batch, target = input_and_target(item)
        steps.zero_grad()
        loss = steps.step(batch, target, None, rule)
        if not rule.needs_norm or _admitted(steps, rule):
            optimizers.step()
        optimizers.step_schedulers()
        yield loss


def _admitted(steps: PipelineSteps, rule: UpdateRule) -> bool:
    """Scale the gradients as the rule says; return whether they are to be used."""
    with steps.watched():
        norm = steps.wait_for_norm(steps.begin_norm())
    return rule.apply(steps.gradients(), norm)
