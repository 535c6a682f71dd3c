"""What an action waits for.

Between two neighbouring stages, for one microbatch (an arrow leads to what waits):

    stage s        F ─────▶ R ─────▶ B (or I) ─────▶ W
                   │                 ▲
                   ▼                 │
    stage s + 1    F ─────▶ R ─────▶ B (or I) ─────▶ W
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipecompile.ir.action_order import Dependencies
from pipecompile.ir.schedule import COMPUTE, Action, Kind, Schedule
from pipecompile.ir.stage_ranks import stage_ranks
from pipecompile.schedule.problem import PlacedProblem

__all__ = [
    "TASK_KINDS",
    "Dependent",
    "compute_dependencies",
    "dependents",
    "waits_for_replicas",
]

# Numbers of the kinds. B and I share one, since a microbatch has one of both in each stage.
_FORWARD, _BACKWARD, _WEIGHT, _RECOMPUTE = range(4)
TASK_KINDS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
    Kind.RECOMPUTE: _RECOMPUTE,
}


class Dependent(NamedTuple):
    """A task that waits for another one of the same microbatch.

    A task is a kind and a stage, as the number `TASK_KINDS[kind] × stages + stage`. This one runs
    on `rank`, or on that of its `replicas` which has the microbatch, and the result that it waits
    for takes `transfer_ns` to get there.
    """

    task: int
    rank: int
    transfer_ns: int
    replicas: int = 1


def dependents(problem: PlacedProblem) -> list[list[Dependent]]:
    """Return by task the tasks that wait for its result.

    They are in the order in which the result is sent: to the next stage first, then over skips.
    """
    stages, placement, ranks = problem.stages, problem.placement, stage_ranks(problem.placement)
    waiting: list[list[Dependent]] = [[] for _ in range(4 * stages)]

    def add(kind: int, stage: int, to_kind: int, to_stage: int, transfer_ns: int = 0) -> None:
        # Within a rank a result is handed over at once.
        is_remote = placement[stage] != placement[to_stage]
        waiting[kind * stages + stage].append(
            Dependent(
                task=to_kind * stages + to_stage,
                rank=placement[to_stage],
                transfer_ns=transfer_ns if is_remote else 0,
                replicas=len(ranks[to_stage]),
            )
        )

    for stage in range(stages):
        add(_FORWARD, stage, _RECOMPUTE, stage)
        add(_FORWARD, stage, _BACKWARD, stage)
        add(_BACKWARD, stage, _WEIGHT, stage)
    # Neighbours come before skips: this is the order in which messages are sent.
    for stage in range(stages - 1):
        add(_FORWARD, stage, _FORWARD, stage + 1, problem.forward_transfer_ns[stage])
        if problem.gradient[stage]:
            add(_BACKWARD, stage + 1, _BACKWARD, stage, problem.backward_transfer_ns[stage])
    for skip in problem.skips:
        add(_FORWARD, skip.source, _FORWARD, skip.destination, skip.forward_ns)
        add(_BACKWARD, skip.destination, _BACKWARD, skip.source, skip.backward_ns)
    return waiting


def waits_for_replicas(schedule: Schedule) -> dict[Action, list[Action]]:
    """Return by action what else it waits for, the first one behind an optimizer step of a stage
    with replicas: the last gradients of the update on the other ranks, which are summed before.
    """
    waits: dict[Action, list[Action]] = {}
    for ranks in schedule.stage_ranks:
        rows = [schedule.rows[rank] for rank in ranks] if len(ranks) > 1 else []
        # Every replica has all steps of its stage.
        # Two ranks of stage 0: the one goes on with F4 when the
        # other's B3 is done, and that one with F5 when B2 is.
        #
        #     rank 0   F0 F2 B0 B2 STEP F4 …
        #     rank 1   F1 F3 B1 B3 STEP F5 …
        for steps in zip(*map(_around_steps, rows), strict=False):
            for after in (each.after for each in steps if each.after is not None):
                waits[after] = [each.before for each in steps if each.after is not after]
    return waits


class _AroundStep(NamedTuple):
    """The compute actions around an optimizer step; none may follow it."""

    before: Action
    after: Action | None


def _around_steps(row: Sequence[Action]) -> Iterator[_AroundStep]:
    """Yield for each optimizer step of a rank with one stage what surrounds it."""
    before: Action | None = None
    is_stepped = False
    for action in (*row, None):
        if action is None or action.kind in COMPUTE:
            if is_stepped and before is not None:
                yield _AroundStep(before, action)
            before, is_stepped = action, False
        elif action.kind is Kind.STEP:
            is_stepped = True


def compute_dependencies(problem: PlacedProblem, schedule: Schedule) -> Dependencies:
    """Return a function that gives the compute actions whose results a compute action uses."""
    stages = problem.stages
    actions = {
        (TASK_KINDS[action.kind] * stages + action.stage, action.microbatch): action
        for row in schedule.compute
        for action in row
    }
    sources: list[list[int]] = [[] for _ in range(4 * stages)]
    for task, waiting in enumerate(dependents(problem)):
        for dependent in waiting:
            sources[dependent.task].append(task)

    def absent(task: int, microbatch: int | None) -> Action:
        # An action waits even for one that the schedule lacks; it is then named as a full backward.
        kind = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)[task // stages]
        return Action(task % stages, kind, microbatch)

    def dependencies(action: Action) -> list[Action]:
        task, microbatch = TASK_KINDS[action.kind] * stages + action.stage, action.microbatch
        return [
            actions.get((source, microbatch)) or absent(source, microbatch)
            for source in sources[task]
        ]

    return dependencies
