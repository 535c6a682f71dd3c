"""What an action waits for, and an order in which all of them can happen."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.schedule.problem import PlacedProblem

__all__ = [
    "TASK_KINDS",
    "Dependent",
    "Dependencies",
    "compute_dependencies",
    "dependents",
    "dependency_order",
    "message_of",
]

Dependencies = Callable[[Action], Sequence[Action]]

# The parts of a microbatch's work in a stage. I and B share one: a microbatch has either in each stage.
_FORWARD, _BACKWARD, _WEIGHT, _AGAIN = range(4)
TASK_KINDS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
    Kind.RECOMPUTE: _AGAIN,
}


class Dependent(NamedTuple):
    """What a task gives to the task `target` on `rank`, for the same microbatch. It takes `hop_ns` to get there.

    The task of an action is the number `PARTS[kind] × stages + stage`.
    """

    target: int
    rank: int
    transfer_ns_between: int


def dependents(problem: PlacedProblem) -> list[list[Dependent]]:
    """By task what it hands over, in the order in which it is sent: to the next stage first, then over skips."""
    stages, placement = problem.stages, problem.placement
    found: list[list[Dependent]] = [[] for _ in range(4 * stages)]

    def hand(part: int, source: int, to: int, target: int, transfer_ns_between: int = 0) -> None:
        away = placement[source] != placement[target]
        found[part * stages + source].append(
            Dependent(to * stages + target, placement[target], transfer_ns_between if away else 0)
        )

    for stage in range(stages):
        hand(_FORWARD, stage, _AGAIN, stage)
        hand(_FORWARD, stage, _BACKWARD, stage)
        hand(_BACKWARD, stage, _WEIGHT, stage)
    for stage in range(stages - 1):
        hand(_FORWARD, stage, _FORWARD, stage + 1, problem.forward_transfer_ns[stage])
        if problem.gradient[stage]:
            hand(_BACKWARD, stage + 1, _BACKWARD, stage, problem.backward_transfer_ns[stage])
    for skip in problem.skips:
        hand(_FORWARD, skip.source, _FORWARD, skip.destination, skip.forward_ns)
        hand(_BACKWARD, skip.destination, _BACKWARD, skip.source, skip.backward_ns)
    return found


def message_of(
    action: Action, stages: int, gradient: Sequence[bool]
) -> tuple[Action, Action] | None:
    """The send and the receive that carry what a compute action made to the next or the previous stage.

    `gradient[s]` says whether a gradient flows from stage s + 1 back to stage s.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage + 1 < stages:
        return Action(stage, Kind.SEND_FORWARD, microbatch), Action(
            stage + 1, Kind.RECEIVE_FORWARD, microbatch
        )
    if action.kind in BACKWARDS and stage and gradient[stage - 1]:
        return Action(stage, Kind.SEND_BACKWARD, microbatch), Action(
            stage - 1, Kind.RECEIVE_BACKWARD, microbatch
        )
    return None


def compute_dependencies(problem: PlacedProblem, schedule: Schedule) -> Dependencies:
    """For each compute action of `schedule` the compute actions, on any rank, whose results it uses."""
    stages = problem.stages
    there = {
        (TASK_KINDS[action.kind] * stages + action.stage, action.microbatch): action
        for row in schedule.compute
        for action in row
    }
    sources: list[list[int]] = [[] for _ in range(4 * stages)]
    for task, given in enumerate(dependents(problem)):
        for handover in given:
            sources[handover.target].append(task)

    def needs(action: Action) -> list[Action]:
        task = TASK_KINDS[action.kind] * stages + action.stage
        # What is not in the schedule is still waited for; its backward is then called by its full name.
        return [
            there.get((source, action.microbatch)) or named(source, action.microbatch)
            for source in sources[task]
        ]

    def named(task: int, microbatch: int | None) -> Action:
        kind = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)[task // stages]
        return Action(task % stages, kind, microbatch)

    return needs


def dependency_order(
    rows: Sequence[Sequence[Action]], needs: Dependencies
) -> Iterator[tuple[int, Action]]:
    """Each (rank, action) after all before it on its rank and all that it needs.

    The order is one of many, but always the same. ScheduleError names what every rank waits for if there is none.
    """
    heads = [0] * len(rows)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        for index in range(heads[rank], len(rows[rank])):
            action = rows[rank][index]
            missing = next((need for need in needs(action) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, action
            heads[rank] += 1
            done.add(action)
            ready.extend(waiting.pop(action, ()))
    if waiting:
        stuck = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
        raise ScheduleError(
            "; ".join(f"rank {r} stops at {rows[r][heads[r]]} until {m} is done" for r, m in stuck)
        )
