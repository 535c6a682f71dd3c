"""Reads an order for a schedule problem from a CSV, the one that torch's pipelining reads too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.plurals import counted
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.schedule.torch_csv import read_csv

__all__ = ["read_order"]


def read_order(path: Path, problem: ScheduleProblem) -> Schedule:
    """Return the order in a file.

    InputError if it is no order for so many stages, ranks and microbatches; ScheduleError if
    actions are missing without which it is no training step.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise InputError(f"{path}: cannot be read ({reason})") from error
    try:
        order = read_csv(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    in_file = _sizes_text(len(order.placement), order.ranks, order.microbatches)
    in_problem = _sizes_text(len(problem.stages), problem.ranks, problem.microbatches)
    if in_file != in_problem:
        raise InputError(f"{path} orders {in_file}, but the problem has {in_problem}")
    missing = list(_missing_actions(order))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ScheduleError(
            f"{path}: rank {order.placement[missing[0].stage]}: {missing[0]} is missing{more}; "
            "a stage does F and B, or F, I and W"
        )
    return order


def _sizes_text(stages: int, ranks: int, microbatches: int) -> str:
    placed = f"{counted(stages, 'stage')} on {counted(ranks, 'rank')}"
    return f"{placed} and {counted(microbatches, 'microbatch')}"


def _missing_actions(order: Schedule) -> Iterator[Action]:
    """Yield the actions without which an order is no training step."""
    actions = {action for row in order.rows for action in row}
    for stage, microbatch in product(range(len(order.placement)), range(order.microbatches)):
        halves = {
            Action(stage, kind, microbatch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        }
        backward = halves if halves & actions else {Action(stage, Kind.BACKWARD, microbatch)}
        yield from sorted({Action(stage, Kind.FORWARD, microbatch), *backward} - actions)
