"""The runtime in one process: all stages on one device, without launcher or messages.

Called by `api/pipeline.py`. The actions of all ranks are performed one after the other.
"""

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
    """Perform `order` (the compute actions of all ranks, merged); return each microbatch's loss.

    Gradients are added to the parameters' `.grad` in the order of the actions. Those of tied
    parameters are summed in the order of the unsplit model.
    """
    local_step = _LocalStep(stages, inputs, targets, seed, step)
    recomputed = {
        (action.stage, action.microbatch) for action in order if action.kind is Kind.RECOMPUTE
    }
    for action in order_for_tied_parameters(order, stages):
        is_recomputed = (action.stage, action.microbatch) in recomputed
        local_step.perform(action, recompute=is_recomputed)
    return local_step.losses()


def evaluate(
    stages: Sequence[EagerStage], inputs: Sequence[Sequence[Tensor]], *, seed: int
) -> list[Sequence[Tensor]]:
    """Return the model's output tensors for each microbatch, without gradients."""
    results = []
    for microbatch, values in enumerate(inputs):
        for stage in stages:
            values = stage.evaluate(values, StreamKey(seed, 0, microbatch))
        results.append(values)
    return results


def order_for_tied_parameters(
    order: Sequence[Action], stages: Sequence[EagerStage]
) -> Iterator[Action]:
    """Yield `order` such that the last stage of a tied parameter computes its gradient first.

    Gradients of tied parameters are handed from later to earlier stages. If an order has the
    backward of an earlier stage first, that backward is split and its second half waits. Stages 0
    and 2 hold a tied parameter, and 0 comes first here:

        order     2I0  1B0  0B0  2W0
        yielded   2I0  1B0  0I0  2W0  0W0
    """
    waits_for = [_later_holders(stages, index) for index in range(len(stages))]
    waiting: list[Action] = []  # weight gradients that have not been computed, in their order
    done: set[tuple[int, int | None]] = set()

    def is_due(action: Action) -> bool:
        # Within one stage the order of weight gradients stays.
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


class _LocalStep:
    """What stages keep, and what they pass to each other, during one step.

    Tables are by (stage, microbatch): `_values` are the inputs that wait for a forward,
    `_gradients` those of outputs that wait for a backward.
    """

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
            (0, microbatch): values for microbatch, values in enumerate(inputs)
        }
        self._gradients: dict[tuple[int, int], Sequence[Tensor | None]] = {}
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._parts: dict[tuple[int, int], BackwardParts] = {}
        self._tied_gradients: list[TiedGradients] = [{} for _ in inputs]

    def perform(self, action: Action, *, recompute: bool) -> None:
        """Perform one action; `recompute` says whether its microbatch is recomputed later."""
        assert action.microbatch is not None
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        tied_gradients = self._tied_gradients[action.microbatch]
        match action.kind:
            case Kind.FORWARD:
                self._forward(stage, key, recompute)
            case Kind.RECOMPUTE:
                stage.recompute(self._saved[key])
            case Kind.BACKWARD:
                gradients = stage.backward(
                    self._saved.pop(key), self._gradients.pop(key, ()), tied_gradients
                )
                self._pass_back(key, gradients)
            case Kind.BACKWARD_INPUT:
                gradients, self._parts[key] = stage.backward_input(
                    self._saved.pop(key), self._gradients.pop(key, ())
                )
                self._pass_back(key, gradients)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(self._parts.pop(key), tied_gradients)
            case _:
                raise AssertionError(f"{action} is not a compute action")

    def _forward(self, stage: EagerStage, key: tuple[int, int], recompute: bool) -> None:
        index, microbatch = key
        stream_key = StreamKey(self._seed, self._step, microbatch)
        outputs, self._saved[key] = stage.forward(
            self._values.pop(key), stream_key, self._targets[microbatch], recompute=recompute
        )
        self._values[index + 1, microbatch] = outputs

    def _pass_back(self, key: tuple[int, int], gradients: Sequence[Tensor | None]) -> None:
        index, microbatch = key
        if index:
            self._gradients[index - 1, microbatch] = gradients

    def losses(self) -> list[Tensor]:
        """Return the loss of each microbatch, once all forwards are done."""
        count = len(self._stages)
        return [self._values[count, microbatch][0] for microbatch in range(len(self._targets))]
