"""Rows: what was predicted and measured, as values, as a Markdown table, and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

__all__ = ["Row", "described", "error_row", "markdown", "merged", "needs_cuda"]

SMALLEST_NS = 1000
"""Times below this have no error in percent: noise decides them, differences are even negative."""


class Row(NamedTuple):
    """One figure: what it is, what was predicted, and what was measured, in `unit`.

    `prediction` says where the predicted figure comes from, such as "expected", "bound" or
    "roofline:h100". `predicted` is None where nothing predicts it, and `measured` where something
    kept it from being measured: the note then says what. `part` is filled in by the runner.
    """

    what: str
    predicted: float | None
    measured: float | None
    unit: str
    prediction: str = ""
    note: str = ""
    part: str = ""

    @property
    def error(self) -> float | None:
        """Predicted / measured − 1; None if one is missing or the figure is too small to tell."""
        if self.predicted is None or not self.measured:
            return None
        if self.unit == "ns" and self.measured < SMALLEST_NS:
            return None
        return self.predicted / self.measured - 1


def needs_cuda(what: str) -> Row:
    """Return the row of what only a GPU can show, from a device that is none."""
    return Row(what, None, None, "", note="needs CUDA")


def error_row(what: str, error: BaseException) -> Row:
    """Return the row of what failed, with the first line of the error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return Row(what, None, None, "", note=f"ERROR: {type(error).__name__}: {first}"[:300])


def described(row: Row) -> str:
    """Return a row as a line of text."""
    figures = f"{_amount(row.predicted, row.unit):>12} {_amount(row.measured, row.unit):>12}"
    error = "" if row.error is None else f"{row.error:+.1%}"
    return f"{row.part:10} {row.what:52} {row.prediction:16} {figures} {error:>8} {row.note}"


def _amount(value: float | None, unit: str) -> str:
    """Return a figure for people: 1.234 ms, 5.6 MiB, or as it is."""
    if value is None:
        return "–"
    match unit:
        case "ns":
            return f"{value / 1e6:.3f} ms"
        case "bytes":
            return f"{value / 2**20:.1f} MiB"
    return f"{value:,.4g}"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table for docs/results.md: a line for each part, prediction and unit.

    "too low" counts the rows whose prediction is below what was measured. For bounds it must be 0.
    """
    lines = [
        "| part | prediction | of | figures | median error | worst | too low |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.error is not None:
            groups.setdefault((row.part, row.prediction, row.unit), []).append(row)
    lines += [_line(*key, group) for key, group in groups.items()]
    lines += [f"| {row.part} | – | {row.what} | – | {row.note} | | |" for row in _unmeasured(rows)]
    return "\n".join(lines)


def _line(part: str, prediction: str, unit: str, rows: Sequence[Row]) -> str:
    errors = [(row.error or 0.0, row.what) for row in rows]
    middle = median(abs(error) for error, _ in errors)
    worst, where = max(errors, key=lambda pair: abs(pair[0]))
    too_low = sum(error < 0 for error, _ in errors)
    kind = {"ns": "time", "bytes": "memory"}.get(unit, unit)
    cells = (part, prediction, kind, len(rows), f"{middle:.1%}", f"{worst:+.1%} ({where})", too_low)
    return f"| {' | '.join(map(str, cells))} |"


def _unmeasured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.measured is None]


def merged(path: Path, head: dict[str, str], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of the file at `path` with these rows in the place of their parts'.

    Parts that were not run keep their rows if the file has the same `head`: the same device and
    versions. Otherwise the file begins anew.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(known.get(key) == value for key, value in head.items())
    parts = {row.part for row in rows}
    kept = [row for row in known.get("rows", ()) if is_same and row["part"] not in parts]
    return {**head, "rows": [*kept, *(row._asdict() for row in rows)]}
