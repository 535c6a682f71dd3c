"""Adds sends, receives and reductions to a schedule of compute actions.

All messages get one global order: that in which the actions that produce them end. Every rank
issues its sends and receives in this order. The order of all actions is then a linear extension of
what each waits for, so the result cannot deadlock, even if every send blocks until it is received.

    before   rank 0   0F0 0F1 0B0 0B1
             rank 1   1F0 1B0 1F1 1B1
    after    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
             rank 1   1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD
"""

from __future__ import annotations

from pipecompile.errors import InputError
from pipecompile.ir.action_order import message_of
from pipecompile.ir.schedule import (
    COMPUTE,
    WEIGHT_GRADIENT_KINDS,
    Action,
    Event,
    Kind,
    Schedule,
)
from pipecompile.schedule.execution import execute
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["add_transfers"]


def add_transfers(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """Return a schedule with its messages, and with a reduction of each stage.

    Stages on one rank pass their tensors on without a message. A receive stands where the message
    can first be there: the runtime posts it there and waits for it later. A reduction follows the
    stage's last gradient; asynchronous schedules have none. Optimizer steps stay behind the action
    that they follow. InputError if the problem has skips, for which torch has no message.
    """
    if problem.skips:
        skip = problem.skips[0]
        raise InputError(
            f"a message from stage {skip.source} to stage {skip.destination} skips the stages "
            "between, which torch's runtime cannot do; relay the tensor through them"
        )
    followers = _followers(schedule)
    # In the example above the message of 0F1 comes before that of 1B0 on both ranks. With 1RECV_F1
    # behind 1SEND_B0, and 0SEND_F1 before 0RECV_B0, each rank could stay in its send for ever.
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, (action, *_) in _by_completion(problem, schedule):
        rows[rank].append(action)
        message = message_of(action, problem.stages, problem.gradient)
        if message:
            send, receive = message
            # Both ends are appended now, so that all ranks have messages in one global order.
            peer = schedule.rank_of(receive)
            if peer != rank:
                rows[rank].append(send)
                rows[peer].append(receive)
        rows[rank] += followers.get(action, ())
    return Schedule.of(
        schedule.name, schedule.microbatches, problem.placement, rows, schedule.weight_versions
    )


def _by_completion(problem: PlacedProblem, schedule: Schedule) -> list[tuple[int, Event]]:
    """Return (rank, event) of all compute actions, sorted by their ends.

    Sorting is stable, so events that end together stay behind those that they wait for.
    """
    execution = execute(problem, schedule)
    events = [iter(row) for row in execution.events]
    in_order = [(rank, next(events[rank])) for rank in execution.rank_order]
    return sorted(in_order, key=lambda item: item[1].end_ns)


def _followers(schedule: Schedule) -> dict[Action, list[Action]]:
    """Return by compute action what directly follows it: optimizer steps and reductions."""
    followers: dict[Action, list[Action]] = {}
    for row in schedule.rows:
        if schedule.weight_versions == "synchronous":
            last = {action.stage: action for action in row if action.kind in WEIGHT_GRADIENT_KINDS}
            for stage, action in last.items():
                followers[action] = [Action(stage, Kind.REDUCE)]
        before: Action | None = None
        for action in row:
            if action.kind in COMPUTE:
                before = action
            elif action.kind is Kind.STEP and before is not None:
                followers.setdefault(before, []).append(action)
    return followers
