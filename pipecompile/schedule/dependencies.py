"""What an action waits for, and an order in which all of them can happen."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import Action, Kind, Schedule

__all__ = ["Needs", "compute_needs", "in_order", "message"]

Needs = Callable[[Action], Sequence[Action]]


def message(action: Action, stages: int, gradient: Sequence[bool]) -> tuple[Action, Action] | None:
    """The send and the receive that carry what a compute action made to the next or the previous stage.

    `gradient[s]` says whether a gradient flows from stage s + 1 back to stage s.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage + 1 < stages:
        send, receive, peer = Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, stage + 1
    elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage and gradient[stage - 1]:
        send, receive, peer = Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, stage - 1
    else:
        return None
    return Action(stage, send, microbatch), Action(peer, receive, microbatch)


def compute_needs(schedule: Schedule, gradient: Sequence[bool]) -> Needs:
    """For each compute action the compute actions, on any rank, whose results it uses."""
    last = len(schedule.placement) - 1
    halved = {(a.stage, a.microbatch) for _, a in schedule if a.kind is Kind.BACKWARD_INPUT}

    def backward(stage: int, microbatch: int | None) -> Action:
        kind = Kind.BACKWARD_INPUT if (stage, microbatch) in halved else Kind.BACKWARD
        return Action(stage, kind, microbatch)

    def needs(action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(stage - 1, Kind.FORWARD, microbatch)] if stage else []
        if action.kind is Kind.BACKWARD_WEIGHT:
            return [Action(stage, Kind.BACKWARD_INPUT, microbatch)]
        own = [Action(stage, Kind.FORWARD, microbatch)]
        if action.kind is Kind.RECOMPUTE or stage == last or not gradient[stage]:
            return own
        return [*own, backward(stage + 1, microbatch)]

    return needs


def in_order(rows: Sequence[Sequence[Action]], needs: Needs) -> Iterator[tuple[int, Action]]:
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
        raise ScheduleError("; ".join(f"rank {r} stops at {rows[r][heads[r]]} until {m} is done" for r, m in stuck))
