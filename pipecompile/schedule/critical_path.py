"""The critical path of a simulated step: what must be faster for the step to be faster."""

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

_Place = tuple[int, int]
"""A rank and an index in its row of events."""


class _Delivery(NamedTuple):
    """The last input of an action to arrive.

    The event at `rank` and `position` produced it or, if it `queued`, the first of the messages
    ahead of it on its link.
    """

    arrival_ns: int
    rank: int
    position: int
    queued: bool


def critical_path(problem: PlacedProblem, timeline: Timeline) -> tuple[CriticalEvent, ...]:
    """Return the events from time 0 to the makespan, each of which waits for the one before it.

    Between two events lies only what the reason of the second one names.
    """
    if not timeline.makespan_ns:
        return ()
    # The path is followed backwards, from the end of the step.
    place: _Place | None
    sums, place = _last_events(timeline)
    path, deliveries = [], _deliveries(problem, timeline)
    while place is not None:
        rank, index = place
        why, place = _predecessor(problem, timeline, deliveries, rank, index)
        path.append(CriticalEvent(rank, timeline.events[rank][index], why))
    return (*reversed(path), *reversed(sums))


def _last_events(timeline: Timeline) -> tuple[list[CriticalEvent], _Place]:
    """Return the sums that the step ends with, last one first, and the last compute event."""
    makespan_ns = timeline.makespan_ns
    for rank, row in enumerate(timeline.events):
        if row and row[-1].end_ns == makespan_ns:
            return [], (rank, len(row) - 1)
    rank = next(
        rank
        for rank, row in enumerate(timeline.reductions)
        if row and row[-1].end_ns == makespan_ns
    )
    sums: list[CriticalEvent] = []
    for event in reversed(timeline.reductions[rank]):
        sums.append(CriticalEvent(rank, event, "reduction"))
        for index, (action, _, end) in enumerate(timeline.events[rank]):
            completes = (action.stage, end) == (event.action.stage, event.start_ns)
            if completes and action.kind in WEIGHT_GRADIENT_KINDS:
                return sums, (rank, index)
    raise AssertionError("the first sum begins when its gradients are there")


def _predecessor(
    problem: PlacedProblem,
    timeline: Timeline,
    deliveries: dict[int, _Delivery],
    rank: int,
    index: int,
) -> tuple[StartReason, _Place | None]:
    """Return why an event does not begin earlier, and the place of the event that it waits for."""
    action, start_ns, _ = timeline.events[rank][index]
    # Reasons are tried from the most local one on: the rank itself, then its inputs.
    if not start_ns:
        return "start", None
    if index and timeline.events[rank][index - 1].end_ns == start_ns:
        return "rank", (rank, index - 1)
    delivery = deliveries.get(_code(problem, action))
    # Neither the rank nor an input explains the start, so sends blocked the rank until then.
    if delivery is None or delivery.arrival_ns < start_ns:
        return "send", (rank, index - 1)
    produced_ns = timeline.events[delivery.rank][delivery.position].end_ns
    why: StartReason = "transfer" if produced_ns < start_ns else "dependency"
    return "queue" if delivery.queued else why, (delivery.rank, delivery.position)


def _code(problem: PlacedProblem, action: Action) -> int:
    task = TASK_KINDS[action.kind] * problem.stages + action.stage
    return task * problem.microbatches + (action.microbatch or 0)


def _deliveries(problem: PlacedProblem, timeline: Timeline) -> dict[int, _Delivery]:
    """Return by action its last input; the rules are those of pipecompile.schedule.simulator."""
    waiting, network = dependents(problem), problem.network
    scheduled = {_code(problem, event.action) for row in timeline.events for event in row}
    last: dict[int, _Delivery] = {}
    for rank, row in enumerate(timeline.events):
        links: dict[int, _Delivery] = {}  # by peer the last message on the link to it
        for index, (action, _, end_ns) in enumerate(row):
            task, number = divmod(_code(problem, action), problem.microbatches)
            clock_ns = end_ns
            for target, first, transfer_ns, replicas in waiting[task]:
                code, peer = target * problem.microbatches + number, first + number % replicas
                # A message without a receiver is not sent.
                if code not in scheduled:
                    continue
                delivery = _Delivery(clock_ns + transfer_ns, rank, index, queued=False)
                if peer == rank:
                    delivery = delivery._replace(arrival_ns=end_ns)
                # The next message of this action leaves only after this one.
                elif network.blocking:
                    clock_ns += transfer_ns
                elif network.shared:
                    delivery = links[peer] = _queued(links.get(peer), delivery, transfer_ns)
                last[code] = max(
                    delivery, last.get(code, delivery), key=lambda item: item.arrival_ns
                )
    return last


def _queued(ahead: _Delivery | None, delivery: _Delivery, transfer_ns: int) -> _Delivery:
    """Return a delivery over a link that the message ahead of it may still occupy."""
    if ahead is None or ahead.arrival_ns <= delivery.arrival_ns - transfer_ns:
        return delivery
    # The message starts when the one ahead arrives, and so keeps that one as its cause.
    return ahead._replace(arrival_ns=ahead.arrival_ns + transfer_ns, queued=True)
