"""Adds receives to a schedule of compute actions, before it is known when these happen.

Cuts are judged by a named schedule while times are still open. How early a receive can be posted
depends on them (transfers.py), but a message is never sent before all that it waits for is done, on
the receiving rank too. Under 1F1B with 4 microbatches that leaves

    rank 0   0F0 0RECV_B0 0F1 0RECV_B1 0B0 0F2 0RECV_B2 0B1 0F3 0RECV_B3 0B2 0B3
    rank 1   1RECV_F0 1RECV_F1 1F0 1B0 1RECV_F2 1F1 1B1 1RECV_F3 1F2 1B2 1F3 1B3

1F2 waits for 0F2, which stands behind 0B0, and that waits for 1B0: so 1RECV_F2 is behind 1B0.
"""

from __future__ import annotations

from collections import defaultdict

from pipecompile.ir.action_order import message_of, past_of
from pipecompile.ir.schedule import Action, Schedule

__all__ = ["add_earliest_receives"]


def add_earliest_receives(schedule: Schedule) -> Schedule:
    """Return the compute actions with a receive of each message, as early as any times allow.

    With whatever times `add_transfers` is given, no receive stands earlier. ScheduleError if the
    schedule cannot be performed.
    """
    rows, placement = schedule.compute, schedule.placement
    # Where no gradient flows, a receive too many is no harm.
    gradient = (True,) * (len(placement) - 1)
    messages = [
        (action, message_of(action, len(placement), gradient)) for row in rows for action in row
    ]
    producers = {message[1]: action for action, message in messages if message}
    # Of 0F2, rank 1 has 2 actions in the past: whenever 0F2 is done, so are 1F0 and 1B0. So the
    # message cannot be under way before these, and `arriving[1, 2]` puts its receive behind them.
    past = past_of(rows, producers)
    arriving: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for receive, producer in producers.items():
        rank = schedule.rank_of(receive)
        if rank != schedule.rank_of(producer):
            arriving[rank, past[producer][rank]].append(receive)
    lowered = []
    for rank, row in enumerate(rows):
        with_receives = list(arriving[rank, 0])
        for index, action in enumerate(row):
            with_receives += [action, *arriving[rank, index + 1]]
        lowered.append(with_receives)
    return Schedule.of(
        schedule.name, schedule.microbatches, placement, lowered, schedule.weight_versions
    )
