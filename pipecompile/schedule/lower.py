"""Sends, receives and reductions for a schedule of compute actions.

All messages get one global order: by the completion of the action that made them. Every rank issues its sends and
receives in that order, so the order of all actions is a linear extension of what each waits for, and the result
cannot deadlock even if every send blocks until it is received.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule, Timeline
from pipecompile.schedule.dependencies import compute_needs, in_order, message

__all__ = ["lower"]


def lower(schedule: Schedule, timeline: Timeline, gradient: Sequence[bool]) -> Schedule:
    """`schedule` with its messages, timed by `timeline` (its own simulation), and one reduction per stage at the end.

    `gradient[s]` says whether a gradient flows from stage s + 1 back to stage s. Stages on one rank pass their
    tensors on directly. A receive stands where the message can first be there: it is posted, and waited for later.
    """
    ends = {event.action: event.end_ns for row in timeline.events for event in row}
    # A stable sort: actions that end together keep an order in which each follows what it needs.
    order = sorted(in_order(schedule.compute, compute_needs(schedule, gradient)), key=lambda item: ends[item[1]])
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, action in order:
        rows[rank].append(action)
        pair = message(action, len(schedule.placement), gradient)
        if pair and schedule.placement[pair[1].stage] != rank:
            rows[rank].append(pair[0])
            rows[schedule.placement[pair[1].stage]].append(pair[1])
    for stage, rank in enumerate(schedule.placement):
        if any(action.stage == stage and action.kind in BACKWARDS for action in schedule.rows[rank]):
            rows[rank].append(Action(stage, Kind.REDUCE))
    return Schedule.of(schedule.name, schedule.microbatches, schedule.placement, rows)
