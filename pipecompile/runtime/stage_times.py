"""The times of a stage's actions, measured as its rank performs them.

Called by `training/stage_timer.py`. These times contain what no sum over nodes has: whether
kernels find their operands in a cache, gradients that are added to others, memory taken from the
system, and the time of Python between nodes.
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
from pipecompile.ir.schedule import BACKWARDS, Action, Kind
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward

__all__ = ["StageWorkload", "measure_stages", "with_split_backwards", "with_whole_backwards"]

LEAST_RUNS, MOST_RUNS = 3, 25
SECONDS = 0.5  # short steps are repeated until they have taken this long


@dataclass(frozen=True)
class StageWorkload:
    """A stage and the data of its actions.

    `inputs` and `targets` are per microbatch. `output_gradients` are the same for every microbatch.
    """

    stage: EagerStage
    inputs: Sequence[Sequence[Tensor]]
    targets: Sequence[Any]
    output_gradients: Sequence[Tensor | None]


def with_whole_backwards(order: Iterable[Action]) -> tuple[Action, ...]:
    """Return the order with each split backward made whole: I becomes B, and W is left out."""
    actions = []
    for action in order:
        if action.kind is Kind.BACKWARD_INPUT:
            actions.append(action._replace(kind=Kind.BACKWARD))
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            actions.append(action)
    return tuple(actions)


def with_split_backwards(order: Iterable[Action]) -> tuple[Action, ...]:
    """Return the order with each backward B split into I and W."""
    actions = []
    for action in order:
        if action.kind is Kind.BACKWARD:
            actions.append(action._replace(kind=Kind.BACKWARD_INPUT))
            actions.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        else:
            actions.append(action)
    return tuple(actions)


@torch.enable_grad()
def measure_stages(
    workloads: Mapping[int, StageWorkload], order: Sequence[Action], device: torch.device
) -> dict[int, dict[Kind, int]]:
    """Return by stage and kind of action the time of one microbatch, in nanoseconds.

    REDUCE stands for the end of a step. Steps are repeated, after one to warm up. A time is the
    mean over the microbatches of a step, and the median of these means over the steps. Each step
    begins without gradients: the first microbatch creates them, and the others add to them.
    """
    clock = Clock(device)
    _run_step(workloads, order, clock)
    start, runs = time.monotonic(), list[dict[Action, int]]()
    # A step of 10 ms is repeated 25 times, one of 100 ms about five times, one of a second three
    # times.
    while len(runs) < LEAST_RUNS or (time.monotonic() - start < SECONDS and len(runs) < MOST_RUNS):
        runs.append(_run_step(workloads, order, clock))
    actions: dict[int, dict[Kind, list[Action]]] = {stage: defaultdict(list) for stage in workloads}
    for action in runs[0]:
        actions[action.stage][action.kind].append(action)
    times: dict[int, dict[Kind, int]] = {stage: {} for stage in workloads}
    for stage, actions_by_kind in actions.items():
        for kind, same_kind in actions_by_kind.items():
            means = [fmean(run[action] for action in same_kind) for run in runs]
            times[stage][kind] = round(median(means))
    return times


def _run_step(
    workloads: Mapping[int, StageWorkload], order: Sequence[Action], clock: Clock
) -> dict[Action, int]:
    """Perform one step of these stages; return the nanoseconds of each action."""
    for workload in workloads.values():
        for parameter in workload.stage.module.parameters():
            parameter.grad = None
    steps = {
        index: _TimedStage(workload, [action for action in order if action.stage == index])
        for index, workload in workloads.items()
    }
    ends = [Action(index, Kind.REDUCE) for index in workloads]
    marks: dict[Action, tuple[Any, Any]] = {}
    clock.wait()
    # Marks are put into the queue and read at the end: waiting in between would cost time.
    for action in (*order, *ends):
        start = clock.mark()
        steps[action.stage].perform(action)
        marks[action] = start, clock.mark()
    clock.wait()
    return {action: clock.between_ns(*pair) for action, pair in marks.items()}


class _TimedStage:
    """A stage during one timed step, with what it keeps between its actions."""

    def __init__(self, workload: StageWorkload, order: Sequence[Action]) -> None:
        self.workload = workload
        kinds = {action.kind for action in order}
        self.trains = not kinds.isdisjoint(BACKWARDS)
        self.recomputed = {action.microbatch for action in order if action.kind is Kind.RECOMPUTE}
        self.saved: dict[int | None, SavedForward] = {}
        self.parts: dict[int | None, BackwardParts] = {}

    def perform(self, action: Action) -> None:
        """Perform one action and drop what would be sent to another stage."""
        stage, gradients = self.workload.stage, self.workload.output_gradients
        index = action.microbatch
        match action.kind:
            case Kind.FORWARD if not self.trains:
                stage.evaluate(self.workload.inputs[index or 0], StreamKey(0, 0, index or 0))
            case Kind.FORWARD:
                self.saved[index] = self._forward(index or 0)
            case Kind.RECOMPUTE:
                stage.recompute(self.saved[index])
            case Kind.BACKWARD:
                stage.backward(self.saved.pop(index), gradients, {})
            case Kind.BACKWARD_INPUT:
                _, self.parts[index] = stage.backward_input(self.saved.pop(index), gradients)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(self.parts.pop(index), {})
            case _:
                divide_gradients(stage.module.parameters(), len(self.workload.inputs))

    def _forward(self, index: int) -> SavedForward:
        workload = self.workload
        _, saved = workload.stage.forward(
            workload.inputs[index],
            StreamKey(0, 0, index),
            workload.targets[index],
            recompute=index in self.recomputed,
        )
        return saved
