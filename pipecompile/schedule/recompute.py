"""Recomputation where its rank would idle, as early as its memory allows.

before   F0 F1 F2 F3 R0 .  .  .  .  B0 R1 B1 R2 B2 R3 B3
after    F0 F1 F2 F3 R0 R1 R2 .  .  B0 B1 B2 R3 B3          with room for three microbatches' activations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind, Schedule
from pipecompile.schedule.execution import Execution, Wait, execute
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["move_recomputes", "insert_recomputes", "add_recomputes"]


def insert_recomputes(row: Iterable[Action], again: Callable[[Action], bool]) -> Iterator[Action]:
    """The row with a recompute right before each backward of what is computed `again`."""
    for action in row:
        if action.kind in BACKWARDS and again(action):
            yield action._replace(kind=Kind.RECOMPUTE)
        yield action


def add_recomputes(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """A schedule without recomputes, with one for each backward that needs it, as early as it may be."""
    if not any(problem.recompute):
        return schedule
    rows = [list(insert_recomputes(row, problem.recomputes)) for row in schedule.rows]
    lazy = Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )
    return move_recomputes(problem, lazy)


def move_recomputes(problem: PlacedProblem, schedule: Schedule) -> Schedule:
    """`schedule` with each recompute that its rank does not wait behind anyway moved into the nearest earlier gap.

    A gap is a wait that is long enough for it, so that nothing else begins later than it does in the simulated step.
    No rank comes to hold more than its cap, or than it did before. The order of all other actions is kept. Where that
    shortens the step there are new gaps, and it is done again.
    """
    run = execute(problem, schedule)
    while True:
        placed = _placed(problem, schedule, run.waits)
        after = execute(problem, placed)
        if _end(after) >= _end(run):
            return schedule
        schedule, run = placed, after


def _end(run: Execution) -> int:
    return max((row[-1].end_ns for row in run.events if row), default=0)


def _placed(
    problem: PlacedProblem, schedule: Schedule, waits: Sequence[Sequence[Wait]]
) -> Schedule:
    caps = problem.caps or (0,) * problem.ranks
    rows = [
        list(_rebuilt(row, _moves(problem, compute, waits[rank], caps[rank])))
        for rank, (row, compute) in enumerate(zip(schedule.rows, schedule.compute, strict=True))
    ]
    return Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )


def _moves(
    problem: PlacedProblem, row: Sequence[Action], waits: Sequence[Wait], cap: int
) -> dict[int, int]:
    """By index of a recompute the index of the action that it goes in front of."""
    held = list(accumulate(map(problem.change_bytes, row)))
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
        if action.kind is not Kind.RECOMPUTE or index + 1 in gaps:
            continue
        time, size = problem.duration_ns(action), problem.change_bytes(action)
        after = forwards[action.stage, action.microbatch]
        gap = next((gap for gap in reversed(earlier) if gaps[gap] >= time), -1)
        if gap > after and max(held[gap - 1 : index]) + size <= limit:
            moves[index] = gap
            gaps[gap] -= time
            held[gap - 1 : index] = [before + size for before in held[gap - 1 : index]]
    return moves


def _rebuilt(row: Sequence[Action], moves: dict[int, int]) -> Iterator[Action]:
    """The row with its compute actions moved; what else is in it stays behind what it followed."""
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
