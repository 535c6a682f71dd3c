"""Why ranks idle: every nanosecond in which a rank does not compute has one cause."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Action, Idle, Kind, Timeline
from pipecompile.schedule.dependencies import TASK_KINDS
from pipecompile.schedule.execution import Execution
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["idle_of"]


def idle_of(problem: PlacedProblem, execution: Execution, timeline: Timeline) -> tuple[Idle, ...]:
    """Return for each rank its idle time by cause; `ir.schedule.Idle` says what the causes are."""
    busy_ns = timeline.busy_ns
    return tuple(
        _idle(problem, execution, timeline, rank, max(busy_ns) - busy_ns[rank])
        for rank in range(len(busy_ns))
    )


def _idle(
    problem: PlacedProblem, execution: Execution, timeline: Timeline, rank: int, spare_ns: int
) -> Idle:
    """Return the causes of one rank, which is busy `spare_ns` less than the busiest one.

    A wait has two parts, and so has the time from a rank's last action to the end of the step:

        wait         start ── memory, imbalance or dependency ── produced ── transfer ── end
        at the end   last action ── reductions (transfer) ── imbalance or dependency ── makespan
    """
    free_ns, waits = execution.free_ns[rank], execution.waits[rank]
    reducing_ns = max(
        0, max((event.end_ns - free_ns for event in timeline.reductions[rank]), default=0)
    )
    arriving_ns = sum(wait.end_ns - wait.produced_ns for wait in waits)
    memory_ns = sum(_blocked_by_memory(problem, execution, timeline, rank))
    producing_ns = sum(wait.produced_ns - wait.start_ns for wait in waits)
    at_end_ns = timeline.makespan_ns - free_ns - reducing_ns
    rest_ns = producing_ns - memory_ns + at_end_ns
    # No order makes a rank idle less than the busiest one leaves it to.
    imbalance_ns = min(rest_ns, spare_ns)
    return Idle(
        dependency_ns=rest_ns - imbalance_ns,
        transfer_ns=execution.sending_ns[rank] + reducing_ns + arriving_ns,
        memory_ns=memory_ns,
        imbalance_ns=imbalance_ns,
    )


def _blocked_by_memory(
    problem: PlacedProblem, execution: Execution, timeline: Timeline, rank: int
) -> Iterator[int]:
    """Yield the part of each wait in which a later forward could have run, had its bytes fitted."""
    # Without caps memory never blocks a rank.
    if problem.caps is None:
        return
    row, held_bytes = timeline.events[rank], timeline.held_bytes[rank]
    # The waits are read backwards. By stage, when the first of the forwards behind the wait has
    # its inputs.
    ready_ns: dict[int, int] = {}
    seen = len(row)
    for wait in reversed(execution.waits[rank]):
        for event in row[wait.position : seen]:
            stage, kind, microbatch, _ = event.action
            if kind is Kind.FORWARD:
                task = TASK_KINDS[kind] * problem.stages + stage
                arrival = execution.arrivals[task * problem.microbatches + (microbatch or 0)]
                ready_ns[stage] = min(arrival, ready_ns.get(stage, arrival))
        seen = wait.position
        held = held_bytes[wait.position - 1] if wait.position else 0
        # What the rank could still take during this wait.
        # A rank that may hold one activation, of two stages with F and B of 1 ns:
        #
        #     rank 0   F0 .  .  B0 F1 .  .  B1 F2 .  .  B2      memory 4, dependency 2
        #     rank 1   .  F0 B0 .  .  F1 B1 .  .  F2 B2 .
        #
        # In its first two waits F1 and F2 have their inputs and no room. Behind
        # the third there is no forward left that memory could have kept back.
        room = problem.caps[rank] - held
        first_ns = min(
            (
                ready_ns[stage]
                for stage in ready_ns
                if problem.change_bytes(Action(stage, Kind.FORWARD)) > room
            ),
            default=wait.produced_ns,
        )
        yield max(0, wait.produced_ns - max(wait.start_ns, first_ns))
