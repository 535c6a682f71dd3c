"""How long the actions of a stage take when its rank performs them: what no sum over its nodes says.

Kernels that find their operands in a cache or do not, gradients that are added to others, memory that is taken from
the system, and all that Python does between two nodes are in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from pipecompile.cost_models.clock import Clock
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.schedule import Action, Kind
from pipecompile.runtime.gradients import scale
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward

__all__ = ["StageWorkload", "with_split_backwards", "measure_stages", "with_whole_backwards"]

LEAST_RUNS, MOST_RUNS = 3, 25
SECONDS = 0.5  # of timed runs, if they are short


@dataclass(frozen=True)
class StageWorkload:
    """A stage and what its actions work on, per microbatch.

    `seeds` are the gradients of its outputs, the same for every microbatch.
    """

    stage: EagerStage
    inputs: Sequence[Sequence[Tensor]]
    targets: Sequence[Any]
    seeds: Sequence[Tensor | None]


def with_whole_backwards(order: Iterable[Action]) -> tuple[Action, ...]:
    """The order with each backward in one piece."""
    named = (a._replace(kind=Kind.BACKWARD) if a.kind is Kind.BACKWARD_INPUT else a for a in order)
    return tuple(action for action in named if action.kind is not Kind.BACKWARD_WEIGHT)


def with_split_backwards(order: Iterable[Action]) -> tuple[Action, ...]:
    """The order with each backward in two halves."""
    return tuple(half for action in order for half in _halves(action))


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return action._replace(kind=Kind.BACKWARD_INPUT), action._replace(kind=Kind.BACKWARD_WEIGHT)


@torch.enable_grad()
def measure_stages(
    works: Mapping[int, StageWorkload], order: Sequence[Action], device: torch.device
) -> dict[int, dict[Kind, int]]:
    """Nanoseconds of each kind of action of each stage, as a mean over the microbatches; REDUCE is the end of a step.

    Steps are repeated, the first one to warm up; of these means the median counts. Each step begins without gradients:
    the first microbatch leaves its own, the others add to them.
    """
    clock = Clock(device)
    _run(works, order, clock)
    started, runs = time.monotonic(), list[dict[Action, int]]()
    while len(runs) < LEAST_RUNS or (
        time.monotonic() - started < SECONDS and len(runs) < MOST_RUNS
    ):
        runs.append(_run(works, order, clock))
    actions: dict[int, dict[Kind, list[Action]]] = {stage: defaultdict(list) for stage in works}
    for action in runs[0]:
        actions[action.stage][action.kind].append(action)
    return {
        stage: {
            kind: round(median(fmean(run[each] for each in same) for run in runs))
            for kind, same in kinds.items()
        }
        for stage, kinds in actions.items()
    }


def _run(works: Mapping[int, StageWorkload], order: Sequence[Action], clock: Clock) -> dict[Action, int]:
    """One step of these stages; what each action took."""
    for work in works.values():
        for parameter in work.stage.module.parameters():
            parameter.grad = None
    steps = {
        index: _TimedStage(work, [a for a in order if a.stage == index]) for index, work in works.items()
    }
    ends = {index: Action(index, Kind.REDUCE) for index in works}
    marks: dict[Action, tuple[Any, Any]] = {}
    clock.wait()
    for action in (*order, *ends.values()):
        start = clock.mark()
        steps[action.stage].perform(action)
        marks[action] = start, clock.mark()
    clock.wait()
    return {action: clock.between_ns(*pair) for action, pair in marks.items()}


class _TimedStage:
    """What a stage keeps between its actions."""

    def __init__(self, work: StageWorkload, order: Iterable[Action]) -> None:
        self.work = work
        self.recomputed = {action.microbatch for action in order if action.kind is Kind.RECOMPUTE}
        self.saved: dict[int | None, SavedForward] = {}
        self.live: dict[int | None, BackwardParts] = {}

    def perform(self, action: Action) -> None:
        """One action; what leaves the stage is dropped."""
        stage, seeds, index = self.work.stage, self.work.seeds, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self.saved[index] = self._forward(index or 0)
            case Kind.RECOMPUTE:
                stage.recompute(self.saved[index])
            case Kind.BACKWARD:
                stage.backward(self.saved.pop(index), seeds, {})
            case Kind.BACKWARD_INPUT:
                _, self.live[index] = stage.backward_input(self.saved.pop(index), seeds)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(self.live.pop(index), {})
            case _:
                scale(stage.module.parameters(), len(self.work.inputs))

    def _forward(self, index: int) -> SavedForward:
        work, again = self.work, index in self.recomputed
        _, saved = work.stage.forward(
            work.inputs[index], StreamKey(0, 0, index), work.targets[index], recompute=again
        )
        return saved
