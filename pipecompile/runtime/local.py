"""The schedule in one process: all stages on the local device, no launcher, no transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.schedule import Action, Kind
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward, TiedGradients

__all__ = ["evaluate", "step"]


def step(
    stages: Sequence[EagerStage],
    order: Sequence[Action],
    inputs: Sequence[Sequence[Tensor]],
    targets: Sequence[Any],
    *,
    seed: int,
    step: int,
) -> list[Tensor]:
    """Performs `order` (the compute actions of all ranks, merged) and returns the loss of each microbatch.

    Gradients are added to the parameters' `.grad`, in the order of the actions, and for tied parameters in that of
    the unsplit model.
    """
    run = _LocalStep(stages, inputs, targets, seed, step)
    recomputed = {
        (action.stage, action.microbatch) for action in order if action.kind is Kind.RECOMPUTE
    }
    for action in in_order_of_sums(order, stages):
        run.perform(action, recompute=(action.stage, action.microbatch) in recomputed)
    return run.losses()


def evaluate(
    stages: Sequence[EagerStage], inputs: Sequence[Sequence[Tensor]], *, seed: int
) -> list[Sequence[Tensor]]:
    """The model's output tensors for each microbatch, without gradients."""
    results = []
    for microbatch, values in enumerate(inputs):
        for stage in stages:
            values = stage.evaluate(values, StreamKey(seed, 0, microbatch))
        results.append(values)
    return results


def in_order_of_sums(order: Sequence[Action], stages: Sequence[EagerStage]) -> Iterator[Action]:
    """`order` such that weight gradients of tied parameters are made in the last of their stages first.

    Where the first stage would come before the last, the second half of its backward waits.
    """
    waits_for = [_later_holders(stages, index) for index in range(len(stages))]
    late: list[Action] = []
    done: set[tuple[int, int | None]] = set()

    def is_due(action: Action) -> bool:
        first = next(other for other in late if other.stage == action.stage)
        return first is action and all(
            (stage, action.microbatch) in done for stage in waits_for[action.stage]
        )

    for action in order:
        if action.kind not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            yield action
            continue
        late.append(action)
        if action.kind is Kind.BACKWARD and not is_due(action):
            yield action._replace(kind=Kind.BACKWARD_INPUT)
            late[-1] = action._replace(kind=Kind.BACKWARD_WEIGHT)
        while (due := next(filter(is_due, late), None)) is not None:
            late.remove(due)
            done.add((due.stage, due.microbatch))
            yield due
    assert not late, f"{late[0]} waits for a later stage that holds one of its parameters"


def _later_holders(stages: Sequence[EagerStage], index: int) -> list[int]:
    """The stages behind `index` that hand on gradients of tied parameters to it."""
    gathered = stages[index].gathered
    return [
        other
        for other in range(index + 1, len(stages))
        if not gathered.isdisjoint(stages[other].tied)
    ]


class _LocalStep:
    """What travels between the stages, and what they keep, during one step."""

    def __init__(
        self,
        stages: Sequence[EagerStage],
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        seed: int,
        step: int,
    ) -> None:
        self._stages = stages
        self._targets = targets
        self._seed, self._step = seed, step
        self._values: dict[tuple[int, int], Sequence[Tensor]] = {
            (0, j): row for j, row in enumerate(inputs)
        }
        self._gradients: dict[tuple[int, int], Sequence[Tensor | None]] = {}
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._live: dict[tuple[int, int], BackwardParts] = {}
        self._carried: list[TiedGradients] = [{} for _ in inputs]

    def perform(self, action: Action, *, recompute: bool) -> None:
        """One action."""
        assert action.microbatch is not None
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        match action.kind:
            case Kind.FORWARD:
                self._forward(stage, key, recompute)
            case Kind.RECOMPUTE:
                stage.recompute(self._saved[key])
            case Kind.BACKWARD:
                carried = self._carried[action.microbatch]
                self._hand_back(
                    key, stage.backward(self._saved.pop(key), self._gradients.pop(key, ()), carried)
                )
            case Kind.BACKWARD_INPUT:
                gradients, self._live[key] = stage.backward_input(
                    self._saved.pop(key), self._gradients.pop(key, ())
                )
                self._hand_back(key, gradients)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(self._live.pop(key), self._carried[action.microbatch])
            case _:
                raise AssertionError(f"{action} is not a compute action")

    def _forward(self, stage: EagerStage, key: tuple[int, int], recompute: bool) -> None:
        index, microbatch = key
        moment = StreamKey(self._seed, self._step, microbatch)
        outputs, self._saved[key] = stage.forward(
            self._values.pop(key), moment, self._targets[microbatch], recompute=recompute
        )
        self._values[index + 1, microbatch] = outputs

    def _hand_back(self, key: tuple[int, int], gradients: Sequence[Tensor | None]) -> None:
        index, microbatch = key
        if index:
            self._gradients[index - 1, microbatch] = gradients

    def losses(self) -> list[Tensor]:
        """The loss of each microbatch, once all forwards are done."""
        return [
            self._values[len(self._stages), microbatch][0]
            for microbatch in range(len(self._targets))
        ]
