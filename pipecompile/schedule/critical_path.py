"""The critical path of a simulated step: what would have to be faster for the step to be faster."""

from __future__ import annotations

from typing import NamedTuple

from pipecompile.ir.schedule import (
    WEIGHT_GRADIENT_KINDS,
    Action,
    CriticalEvent,
    StartReason,
    Timeline,
)
from pipecompile.schedule.dependencies import TASK_KINDS, dependents
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["critical_path"]


class _Delivery(NamedTuple):
    """The last input of an action: when it arrives, and the event that set it on its way or blocked that way."""

    arrival_ns: int
    rank: int
    position: int
    queued: bool


def critical_path(problem: PlacedProblem, timeline: Timeline) -> tuple[CriticalEvent, ...]:
    """Events from time 0 to the makespan; each begins when the one before it ends, and what `why` names is over."""
    if not timeline.makespan_ns:
        return ()
    sums, place = _end(timeline)
    found, deliveries = [], _deliveries(problem, timeline)
    while place is not None:
        rank, index = place
        why, place = _before(problem, timeline, deliveries, rank, index)
        found.append(CriticalEvent(rank, timeline.events[rank][index], why))
    return (*reversed(found), *reversed(sums))


def _end(timeline: Timeline) -> tuple[list[CriticalEvent], tuple[int, int] | None]:
    """The sums that the step ends with, backwards, and the place of the last compute event on the path."""
    makespan = timeline.makespan_ns
    for rank, row in enumerate(timeline.events):
        if row and row[-1].end_ns == makespan:
            return [], (rank, len(row) - 1)
    rank = next(
        rank for rank, row in enumerate(timeline.reductions) if row and row[-1].end_ns == makespan
    )
    sums: list[CriticalEvent] = []
    for event in reversed(timeline.reductions[rank]):
        sums.append(CriticalEvent(rank, event, "reduction"))
        for index, (action, _, end) in enumerate(timeline.events[rank]):
            if (action.stage, end) == (
                event.action.stage,
                event.start_ns,
            ) and action.kind in WEIGHT_GRADIENT_KINDS:
                return sums, (rank, index)
    raise AssertionError("the first sum begins when its gradients are there")


def _before(
    problem: PlacedProblem,
    timeline: Timeline,
    deliveries: dict[int, _Delivery],
    rank: int,
    index: int,
) -> tuple[StartReason, tuple[int, int] | None]:
    """Why an event does not begin earlier, and the place of the one that it waits for."""
    action, start, _ = timeline.events[rank][index]
    if not start:
        return "start", None
    if index and timeline.events[rank][index - 1].end_ns == start:
        return "rank", (rank, index - 1)
    delivery = deliveries.get(_code(problem, action))
    if delivery is None or delivery.arrival_ns < start:
        return "send", (rank, index - 1)
    made = timeline.events[delivery.rank][delivery.position].end_ns
    why: StartReason = "queue" if delivery.queued else "transfer" if made < start else "dependency"
    return why, (delivery.rank, delivery.position)


def _code(problem: PlacedProblem, action: Action) -> int:
    task = TASK_KINDS[action.kind] * problem.stages + action.stage
    return task * problem.microbatches + (action.microbatch or 0)


def _deliveries(problem: PlacedProblem, timeline: Timeline) -> dict[int, _Delivery]:
    """By action the last of its inputs; the rules are those of pipecompile.schedule.simulator."""
    given, network = dependents(problem), problem.network
    there = {_code(problem, event.action) for row in timeline.events for event in row}
    found: dict[int, _Delivery] = {}
    for rank, row in enumerate(timeline.events):
        lines: dict[int, _Delivery] = {}
        for index, (action, _, end) in enumerate(row):
            task, number = divmod(_code(problem, action), problem.microbatches)
            clock = end
            for target, peer, hop in given[task]:
                code = target * problem.microbatches + number
                if code not in there:
                    continue
                delivery = _Delivery(clock + hop, rank, index, queued=False)
                if peer != rank and network.blocking:
                    clock += hop
                elif peer != rank and network.shared:
                    delivery = lines[peer] = _after(lines.get(peer), delivery, hop)
                elif peer == rank:
                    delivery = delivery._replace(arrival_ns=end)
                found[code] = max(
                    delivery, found.get(code, delivery), key=lambda one: one.arrival_ns
                )
    return found


def _after(earlier: _Delivery | None, delivery: _Delivery, hop: int) -> _Delivery:
    """A delivery on a line on which another one may still be under way."""
    if earlier is None or earlier.arrival_ns <= delivery.arrival_ns - hop:
        return delivery
    return earlier._replace(arrival_ns=earlier.arrival_ns + hop, queued=True)
