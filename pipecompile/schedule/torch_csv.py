"""Schedules as the CSV that torch.distributed.pipelining reads, and writes as "compute_only".

A line is a rank, a cell an action: 0F2, 0I2, 0W2 or 0B2. torch writes an empty cell where a rank
idles.
"""

from __future__ import annotations

import csv
import io

from pipecompile.errors import InputError
from pipecompile.ir.schedule import COMPUTE, Action, Kind, Schedule

__all__ = ["read_csv", "write_csv"]

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)


def read_csv(text: str, name: str = "csv") -> Schedule:
    """Return the schedule in a text; InputError names the line and column that are wrong."""
    rows = []
    for line, cells in enumerate(_lines(text), start=1):
        row = []
        for column, cell in enumerate(cells, start=1):
            if cell.strip():
                row.append(_action(cell.strip(), line, column))
        rows.append(row)
    while rows and not rows[-1]:  # empty lines at the end are no ranks
        rows.pop()
    numbers = [action.microbatch or 0 for row in rows for action in row]
    try:
        return Schedule.of(name, max(numbers, default=0) + 1, _placement(rows), rows)
    except ValueError as error:
        raise InputError(f"the CSV is no schedule: {error}") from None


def _lines(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InputError(f"the text is no CSV ({error})") from None


def write_csv(schedule: Schedule) -> str:
    """Return the CSV of a schedule; InputError if it has actions that the format cannot hold."""
    lines = [
        [str(_writable(action, line, column)) for column, action in enumerate(row, start=1)]
        for line, row in enumerate(schedule.rows, start=1)
    ]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return text.getvalue()


def _action(text: str, line: int, column: int) -> Action:
    try:
        action = Action.parse(text)
    except ValueError as error:
        raise InputError(
            f"line {line}, column {column}: {error}; the CSV has F, I, W and B only"
        ) from None
    return _writable(action, line, column)


def _writable(action: Action, line: int, column: int) -> Action:
    """Return the action itself; InputError if torch's CSV cannot hold it."""
    if action.version is not None:
        advice = (
            "weight versions cannot be written; only schedules with one optimizer step for each "
            "minibatch can"
        )
    elif action.kind in _KINDS:
        return action
    elif action.kind in COMPUTE:
        advice = "a recompute cannot be written; plan without recompute"
    elif action.kind is Kind.STEP:
        advice = "optimizer steps cannot be written; leave them to the training loop"
    else:
        advice = (
            "torch adds transfers and reductions itself; write the schedule before they are added"
        )
    raise InputError(f"line {line}, column {column}: {action} is not F, I, W or B: {advice}")


def _placement(rows: list[list[Action]]) -> list[int]:
    """Return the rank of each stage: the line that has its actions."""
    # The format has no placement: each line is a rank, and its cells say which stages lie there.
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            other = ranks.setdefault(action.stage, rank)
            if other != rank:
                raise InputError(
                    f"line {rank + 1} performs {action}, but stage {action.stage} is on "
                    f"line {other + 1}"
                )
    missing = set(range(max(ranks, default=0) + 1)) - ranks.keys()
    if missing:
        raise InputError(
            f"no line performs stage {min(missing)}; stages are numbered from 0 without a gap"
        )
    return [ranks[stage] for stage in range(len(ranks))]
