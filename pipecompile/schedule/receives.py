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
from collections.abc import Mapping, Sequence

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.schedule.dependencies import dependency_order, message_of

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
    past = _past(rows, producers)
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


def _past(
    rows: Sequence[Sequence[Action]], producers: Mapping[Action, Action]
) -> dict[Action, tuple[int, ...]]:
    """Return for each action how many actions of each rank are done whenever it is done.

    These are vector clocks (Fidge 1988, Mattern 1989). `producers` are by receive.
    """

    def sources(action: Action) -> list[Action]:
        receives = {Kind.FORWARD: Kind.RECEIVE_FORWARD}
        receives |= dict.fromkeys(BACKWARDS, Kind.RECEIVE_BACKWARD)
        kind = receives.get(action.kind)
        producer = producers.get(action._replace(kind=kind)) if kind else None
        return [] if producer is None else [producer]

    clocks = [(0,) * len(rows) for _ in rows]
    past: dict[Action, tuple[int, ...]] = {}
    for rank, action in dependency_order(rows, sources):
        known = clocks[rank]
        for source in sources(action):
            known = tuple(map(max, known, past[source]))
        known = (*known[:rank], known[rank] + 1, *known[rank + 1 :])
        clocks[rank] = past[action] = known
    return past
