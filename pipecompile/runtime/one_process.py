"""The runtime in one process: all stages on one device, without launcher or messages.

Called by `training/runner.py`. The actions of all ranks are performed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir.schedule import Action, Kind
from pipecompile.runtime.rank_step import (
    ActionObserver,
    Minibatch,
    RankStep,
    StepResult,
    recomputed_microbatches,
)
from pipecompile.runtime.stage import EagerStage

__all__ = ["evaluate", "step"]


def step(
    stages: Sequence[EagerStage],
    order: Sequence[Action],
    batch: Minibatch,
    observers: Sequence[ActionObserver] = (),
    remainder: Sequence[EagerStage] | None = None,
) -> StepResult:
    """Perform `order` (the compute actions of all ranks, merged); return what the last stage does.

    Gradients are added to the parameters' `.grad` in the order of the actions. Those of tied
    parameters are summed in the order of the unsplit model. `remainder` are the stages for the last
    microbatch if that is smaller than the others.
    """
    rank_step = RankStep(
        dict(enumerate(stages)),
        len(stages),
        batch,
        recomputed_microbatches(order),
        observers=observers,
        remainder=_by_index(remainder),
    )
    if any(stage.tied_to_later for stage in stages):
        order = list(order_for_tied_parameters(order, stages))
    for action in order:
        rank_step.perform(action)
    result = rank_step.result()
    assert result is not None
    return result


def evaluate(
    stages: Sequence[EagerStage],
    batch: Minibatch,
    *,
    with_loss: bool = False,
    remainder: Sequence[EagerStage] | None = None,
) -> StepResult:
    """Return the model's output tensors for each microbatch, without gradients.

    With `with_loss`, return the losses and what came with them instead. `remainder` is as for
        `step`.
    """
    rank_step = RankStep(
        dict(enumerate(stages)),
        len(stages),
        batch,
        (),
        trains=False,
        with_loss=with_loss,
        remainder=_by_index(remainder),
    )
    for microbatch in range(len(batch.inputs)):
        for index in range(len(stages)):
            rank_step.perform(Action(index, Kind.FORWARD, microbatch))
    result = rank_step.result()
    assert result is not None
    return result


def _by_index(stages: Sequence[EagerStage] | None) -> dict[int, EagerStage] | None:
    return None if stages is None else dict(enumerate(stages))


def order_for_tied_parameters(
    order: Sequence[Action], stages: Sequence[EagerStage]
) -> Iterator[Action]:
    """Yield `order` such that the last stage of a tied parameter computes its gradient first.

    Gradients of tied parameters are handed from later to earlier stages. If an order has the
    backward of an earlier stage first, that backward is split and its weight backward waits. Stages
    0 and 2 hold a tied parameter, and 0 comes first here:

        order     2I0  1B0  0B0  2W0
        yielded   2I0  1B0  0I0  2W0  0W0
    """
    waits_for = [_later_holders(stages, index) for index in range(len(stages))]
    waiting: list[Action] = []  # weight backwards that have not been run, in their order
    done: set[tuple[int, int | None]] = set()

    def is_due(action: Action) -> bool:
        # Within one stage the order of weight backwards stays.
        first_of_stage = next(other for other in waiting if other.stage == action.stage)
        return first_of_stage is action and all(
            (stage, action.microbatch) in done for stage in waits_for[action.stage]
        )

    for action in order:
        if action.kind not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            yield action
            continue
        waiting.append(action)
        if action.kind is Kind.BACKWARD and not is_due(action):
            yield action._replace(kind=Kind.BACKWARD_INPUT)
            waiting[-1] = action._replace(kind=Kind.BACKWARD_WEIGHT)
        while (due := next(filter(is_due, waiting), None)) is not None:
            waiting.remove(due)
            done.add((due.stage, due.microbatch))
            yield due
    assert not waiting, f"{waiting[0]} waits for a later stage that holds one of its parameters"


def _later_holders(stages: Sequence[EagerStage], index: int) -> list[int]:
    """Return the stages after `index` that hand gradients of tied parameters to it."""
    shared = stages[index].tied_to_later
    return [
        later
        for later in range(index + 1, len(stages))
        if not shared.isdisjoint(stages[later].tied_to_earlier)
    ]
