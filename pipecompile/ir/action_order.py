"""In which order actions happen: what comes before an action on all ranks, at whatever times.

rank 0    0F0  0F1  0B0         0B0 follows 1B0, which sends it a gradient, and so 1F0 and 0F0:
rank 1    1F0  1B0  1F1         its past has three actions of rank 0, itself too, and two of rank 1
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import BACKWARDS, Action, Kind

__all__ = ["Dependencies", "dependency_order", "message_of", "past_of"]

Dependencies = Callable[[Action], Sequence[Action]]
"""Returns what an action waits for."""


def message_of(
    action: Action, stages: int, gradient: Sequence[bool]
) -> tuple[Action, Action] | None:
    """Return the send and the receive of a compute action's result; None if it is not sent.

    It goes to the next stage or to the previous one. `gradient[s]` says whether a gradient flows
    from stage s + 1 back to stage s.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage + 1 < stages:
        send = Action(stage, Kind.SEND_FORWARD, microbatch)
        return send, Action(stage + 1, Kind.RECEIVE_FORWARD, microbatch)
    # Both B and I produce the gradient that the stage before waits for; W produces none.
    if action.kind in BACKWARDS and stage and gradient[stage - 1]:
        send = Action(stage, Kind.SEND_BACKWARD, microbatch)
        return send, Action(stage - 1, Kind.RECEIVE_BACKWARD, microbatch)
    return None


def dependency_order(
    rows: Sequence[Sequence[Action]], dependencies: Dependencies
) -> Iterator[tuple[int, Action]]:
    """Yield each (rank, action) after all before it on its rank and all that it waits for.

    This is one of many such orders, but always the same. If there is none, ScheduleError says what
    every rank waits for in the end.
    """
    heads = [0] * len(rows)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        for index in range(heads[rank], len(rows[rank])):
            action = rows[rank][index]
            # A rank waits for one missing action at a time, in the list of that action. When it
            # is done the rank is looked at again, and may then wait for another one: no row is
            # searched in vain.
            missing = next((need for need in dependencies(action) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, action
            heads[rank] += 1
            done.add(action)
            # The ranks that waited for this action go on after those that are ready already.
            ready.extend(waiting.pop(action, ()))
    if waiting:
        stuck = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
        raise ScheduleError(
            "; ".join(
                f"rank {rank} stops at {rows[rank][heads[rank]]} until {missing} is done"
                for rank, missing in stuck
            )
        )


def past_of(
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
        # In the drawing above, as (actions of rank 0, of rank 1): 0F0 (1, 0), 0F1 (2, 0), 1F0 (1,
        # 1) since it knows 0F0, 1B0 (1, 2), and 0B0 the most of (2, 0) and (1, 2), and itself:
        # (3, 2).
        known = clocks[rank]
        for source in sources(action):
            known = tuple(map(max, known, past[source]))
        known = (*known[:rank], known[rank] + 1, *known[rank + 1 :])
        clocks[rank] = past[action] = known
    return past
