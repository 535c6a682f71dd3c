"""Why ranks idle: every nanosecond in which a rank does not compute has one cause."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Action, Idle, Kind, Timeline
from pipecompile.schedule.dependencies import TASK_KINDS
from pipecompile.schedule.execution import Execution
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["idle_of"]


def idle_of(problem: PlacedProblem, run: Execution, timeline: Timeline) -> tuple[Idle, ...]:
    """Per rank the idle time by cause; `ir.schedule.Idle` says what the causes are."""
    busy = timeline.busy_ns
    return tuple(
        _idle(problem, run, timeline, rank, max(busy) - busy[rank]) for rank in range(len(busy))
    )


def _idle(
    problem: PlacedProblem, run: Execution, timeline: Timeline, rank: int, less_ns: int
) -> Idle:
    """The causes of one rank, which has `less_ns` less to do than the busiest."""
    tail = timeline.makespan_ns - run.free_ns[rank]
    summing = max(
        (event.end_ns - run.free_ns[rank] for event in timeline.reductions[rank]), default=0
    )
    transfer = (
        run.sending_ns[rank]
        + max(0, summing)
        + sum(wait.end_ns - wait.produced_ns for wait in run.waits[rank])
    )
    memory = sum(_held_back(problem, run, timeline, rank))
    rest = (
        sum(wait.produced_ns - wait.start_ns for wait in run.waits[rank])
        - memory
        + tail
        - max(0, summing)
    )
    imbalance = min(rest, less_ns)
    return Idle(
        dependency_ns=rest - imbalance,
        transfer_ns=transfer,
        memory_ns=memory,
        imbalance_ns=imbalance,
    )


def _held_back(
    problem: PlacedProblem, run: Execution, timeline: Timeline, rank: int
) -> Iterator[int]:
    """Of each wait the part in which some later forward could have started, had its bytes fitted."""
    if problem.caps is None:
        return
    row, held = timeline.events[rank], timeline.held_bytes[rank]
    ready: dict[
        int, int
    ] = {}  # by stage, when the first of the forwards from `seen` on has its inputs
    seen = len(row)
    for wait in reversed(run.waits[rank]):
        for event in row[wait.position : seen]:
            stage, kind, microbatch, _ = event.action
            if kind is Kind.FORWARD:
                code = (TASK_KINDS[kind] * problem.stages + stage) * problem.microbatches + (
                    microbatch or 0
                )
                ready[stage] = min(run.arrivals[code], ready.get(stage, run.arrivals[code]))
        seen = wait.position
        room = problem.caps[rank] - (held[wait.position - 1] if wait.position else 0)
        too_large = (s for s in ready if problem.change_bytes(Action(s, Kind.FORWARD)) > room)
        first = min((ready[s] for s in too_large), default=wait.produced_ns)
        yield max(0, wait.produced_ns - max(wait.start_ns, first))
