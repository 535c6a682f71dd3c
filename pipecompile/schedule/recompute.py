"""Places recomputes where their rank would idle, as early as its memory allows.

before   F0 F1 F2 F3 R0 .  .  .  .  B0 R1 B1 R2 B2 R3 B3
after    F0 F1 F2 F3 R0 R1 R2 .  .  B0 B1 B2 R3 B3          with memory for three recomputed ones
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind, Schedule
from pipecompile.schedule.execution import Execution, Wait, execute
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["add_recomputes", "insert_recomputes", "move_recomputes"]


def insert_recomputes(
    row: Iterable[Action], is_recomputed: Callable[[Action], bool]
) -> Iterator[Action]:
    """Yield the row with a recompute right before each backward for which that is asked."""
    for action in row:
        if action.kind in BACKWARDS and is_recomputed(action):
            yield action._replace(kind=Kind.RECOMPUTE)
        yield action


def add_recomputes(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """Return a schedule with the recomputes that its stages need, each as early as it may be."""
    if not any(problem.recompute):
        return schedule
    rows = [list(insert_recomputes(row, problem.recomputes)) for row in schedule.rows]
    late = Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )
    return move_recomputes(problem, late)


def move_recomputes(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """Return a schedule with recomputes moved into the nearest earlier gap.

    A recompute stays where its own backward waits for a gradient anyway, since it then delays
    nothing. A gap is a wait of the rank that is long enough for the recompute, so no other action
    begins later than in the simulated step. No rank comes to hold more than its cap, or than it
    held before. All other actions keep their order. Where moves shorten the step there are new
    gaps, and recomputes are moved once more. Where they do not, the schedule is returned as it
    was.
    """
    execution = execute(problem, schedule)
    while True:
        moved = _moved_into_gaps(problem, schedule, execution.waits)
        after = execute(problem, moved)
        # Moves delay nothing, so either the step got shorter or they gained nothing.
        if _end_ns(after) >= _end_ns(execution):
            return schedule
        schedule, execution = moved, after


def _end_ns(execution: Execution) -> int:
    return max((row[-1].end_ns for row in execution.events if row), default=0)


def _moved_into_gaps(
    problem: PlacedProblem, schedule: Schedule, waits: Sequence[Sequence[Wait]]
) -> Schedule:
    caps = problem.caps or (0,) * problem.ranks
    rows = []
    for rank, (row, compute) in enumerate(zip(schedule.rows, schedule.compute, strict=True)):
        moves = _moves(problem, compute, waits[rank], caps[rank])
        rows.append(list(_with_moves(row, moves)))
    return Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )


def _moves(
    problem: PlacedProblem, row: Sequence[Action], waits: Sequence[Wait], cap: int
) -> dict[int, int]:
    """Return by index of a recompute the index of the action in front of which it goes."""
    held = list(accumulate(map(problem.change_bytes, row)))
    # Orders over their cap are allowed here; they must only not get worse.
    limit = max([cap, *held])
    gaps = {wait.position: wait.end_ns - wait.start_ns for wait in waits}
    moves: dict[int, int] = {}
    earlier: list[int] = []
    forwards: dict[tuple[int, int | None], int] = {}
    for index, action in enumerate(row):
        if index in gaps:
            earlier.append(index)
        if action.kind is Kind.FORWARD:
            forwards[action.stage, action.microbatch] = index
        # A recompute whose backward waits anyway delays nothing where it is.
        if action.kind is not Kind.RECOMPUTE or index + 1 in gaps:
            continue
        time_ns, size = problem.duration_ns(action), problem.change_bytes(action)
        forward = forwards[action.stage, action.microbatch]
        # The nearest one, so that what is recomputed is held as briefly as possible.
        gap = next((gap for gap in reversed(earlier) if gaps[gap] >= time_ns), -1)
        if gap > forward and max(held[gap - 1 : index]) + size <= limit:
            moves[index] = gap
            gaps[gap] -= time_ns
            # What is recomputed is held from the gap on.
            held[gap - 1 : index] = [before + size for before in held[gap - 1 : index]]
    return moves


def _with_moves(row: Sequence[Action], moves: dict[int, int]) -> Iterator[Action]:
    """Yield the row with its compute actions moved; others stay behind what they followed."""
    compute = [action for action in row if action.kind in COMPUTE]
    moved: dict[int, list[Action]] = defaultdict(list)
    for index, target in moves.items():
        moved[target].append(compute[index])
    index = 0
    for action in row:
        if action.kind not in COMPUTE:
            yield action
            continue
        yield from moved[index]
        if index not in moves:
            yield action
        index += 1
