"""How many gradients a stage has sent of which it cannot know yet that they were read.

What was sent is freed once the order of actions says that the other rank has read it. What went
forward was read when the backward of its microbatch is done, a gradient before any forward that
follows its reader on the other rank. Under 1F1B on the last two of three ranks:

    rank 1    F0 F1 B0 F2 B1 F3 B2 …       F2 of rank 1 follows its B0
    rank 2    F0 B0 F1 B1 F2 B2 F3 …       so F2 of rank 2 tells that the gradient of 0 was read

As rank 2 sends the gradient of 2, that of 1 may be unread too. When no forwards are left, nothing
tells any more, and all that follow are unread until the step ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from functools import lru_cache

from pipecompile.ir.action_order import message_of, past_of
from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule

__all__ = ["UnreadGradients", "unread_gradients"]

UnreadGradients = Mapping[tuple[int, int | None], int]
"""By stage and microbatch: how many gradients of the stage are unread, at most, as it sends that of
the microbatch. It is one of them, and they are counted from the first unread one on.
"""


@lru_cache(maxsize=16)
def unread_gradients(schedule: Schedule) -> UnreadGradients:
    """Return how many gradients are unread as one is sent to another rank.

    ScheduleError if the schedule cannot be performed.
    """
    producers = _producers(schedule)
    past = past_of(schedule.compute, producers)
    # When a gradient was read: so many actions of that rank are done then.
    readers = {
        (action.stage, action.microbatch): (rank, index + 1)
        for rank, row in enumerate(schedule.compute)
        for index, action in enumerate(row)
        if action.kind in BACKWARDS
    }
    counts: dict[tuple[int, int | None], int] = {}
    for rank, row in enumerate(schedule.compute):
        unread: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        for action in (action for action in row if action.kind in BACKWARDS):
            stage, microbatch = action.stage, action.microbatch
            reader = readers.get((stage - 1, microbatch), (rank, 0))
            is_sent = Action(stage - 1, Kind.RECEIVE_BACKWARD, microbatch) in producers
            if not is_sent or reader[0] == rank:
                continue
            sent = unread[stage]
            while sent and past[action][sent[0][0]] >= sent[0][1]:
                sent.popleft()
            sent.append(reader)
            counts[stage, microbatch] = len(sent)
    return counts


def _producers(schedule: Schedule) -> dict[Action, Action]:
    """Return by receive what makes its message: by all of them, if the schedule has no receives."""
    stages = len(schedule.placement)
    receives = {Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD}
    received = {action for _, action in schedule if action.kind in receives}
    producers = {}
    for action in (action for row in schedule.compute for action in row):
        message = message_of(action, stages, (True,) * (stages - 1))
        if message is not None and (not received or message[1] in received):
            producers[message[1]] = action
    return producers
