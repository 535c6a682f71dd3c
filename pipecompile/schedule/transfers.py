"""Sends, receives and reductions for a schedule of compute actions.

All messages get one global order: by the completion of the action that made them. Every rank issues its sends and
receives in that order, so the order of all actions is a linear extension of what each waits for, and the result
cannot deadlock even if every send blocks until it is received.
"""

from __future__ import annotations

from pipecompile.errors import InputError
from pipecompile.ir.schedule import COMPUTE, WEIGHT_GRADIENT_KINDS, Action, Event, Kind, Schedule
from pipecompile.schedule.dependencies import message_of
from pipecompile.schedule.execution import execute
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["add_transfers"]


def add_transfers(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """`schedule` with its messages, and a reduction of each stage once its gradients are complete.

    Stages on one rank pass their tensors on directly. A receive stands where the message can first be there: it is
    posted, and waited for later. Optimizer steps stay behind the action that they follow; schedules that have no
    common step ("synchronous") get no reductions. InputError if tensors pass stages by: torch knows no such message.
    """
    if problem.skips:
        first = problem.skips[0]
        raise InputError(
            f"a message from stage {first.source} to {first.destination} passes stages by, which torch's runtime "
            "cannot do; let the stages between relay the tensor"
        )
    placement, behind = problem.placement, _behind(schedule)
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, (action, *_) in _by_completion(problem, schedule):
        rows[rank].append(action)
        pair = message_of(action, problem.stages, problem.gradient)
        if pair and placement[pair[1].stage] != rank:
            rows[rank].append(pair[0])
            rows[placement[pair[1].stage]].append(pair[1])
        rows[rank] += behind.get(action, ())
    return Schedule.of(
        schedule.name, schedule.microbatches, placement, rows, schedule.weight_versions
    )


def _by_completion(problem: PlacedProblem, schedule: Schedule) -> list[tuple[int, Event]]:
    """The compute actions of all ranks by their ends; those that end together follow what they need."""
    run = execute(problem, schedule)
    events = [iter(row) for row in run.events]
    return sorted(
        ((rank, next(events[rank])) for rank in run.rank_order), key=lambda item: item[1].end_ns
    )


def _behind(schedule: Schedule) -> dict[Action, list[Action]]:
    """By compute action the steps that follow it, and the reduction of a stage whose gradients it completes."""
    found: dict[Action, list[Action]] = {}
    for row in schedule.rows:
        reduced = schedule.weight_versions == "synchronous"
        last = {
            action.stage: action
            for action in row
            if reduced and action.kind in WEIGHT_GRADIENT_KINDS
        }
        found |= {action: [Action(stage, Kind.REDUCE)] for stage, action in last.items()}
        before: Action | None = None
        for action in row:
            if action.kind in COMPUTE:
                before = action
            elif action.kind is Kind.STEP and before is not None:
                found.setdefault(before, []).append(action)
    return found
