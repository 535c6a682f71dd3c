"""What differs between two plans, for people: as text, and as Markdown for a page of GitHub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.links import Links
from pipecompile.ir.plurals import counted
from pipecompile.ir.size import option_text, size_text
from pipecompile.report.links import links_text, overhead_texts
from pipecompile.report.plan_diff import ChangeKind, PlanChange, PlanDiff
from pipecompile.report.tables import DrawTable, markdown_table, plain_table
from pipecompile.report.units import gap_text

__all__ = ["DiffTable", "diff_headline", "diff_markdown", "diff_tables", "diff_text"]

SAME = "the plans are the same"
_DIGEST = 12  # letters of a digest that are shown, as in other messages

_HEADINGS: dict[ChangeKind, str] = {
    "step": "step",
    "memory": "memory",
    "load": "loads",
    "move": "moved",
    "copies": "copied nodes",
    "recompute": "recompute",
    "schedule": "schedule",
    "search": "search",
    "choice": "choice among settings",
    "option": "options",
    "links": "links",
    "model": "model",
    "costs": "costs",
    "other": "only these fields differ: a file was edited, or another pipecompile wrote it",
}
_TABLES = ("step", "memory", "load")


@dataclass(frozen=True)
class DiffTable:
    """Changes of one kind with their heading. The first row is the header; columns `words` hold no
    numbers.
    """

    heading: str
    rows: Sequence[Sequence[str]]
    words: Sequence[int]


def diff_text(diff: PlanDiff, draw: DrawTable = plain_table) -> str:
    """Return what `diff` prints: notes, tables of figures, then a line for each other change."""
    if diff.same:
        return SAME
    parts = [list(diff.notes)]
    for kind, changes in _groups(diff):
        if kind in _TABLES:
            parts.append(list(draw(_rows(kind, changes, diff), {0})))
        else:
            lines = (f"  {where}: {values}" for where, values in _lines(changes, diff))
            parts.append([_HEADINGS[kind], *lines])
    return "\n\n".join("\n".join(part) for part in parts if part)


def diff_markdown(diff: PlanDiff, title: str) -> str:
    """Return the same as Markdown with a `title`: for the summary of a job."""
    parts = [[f"### {title}"]]
    if diff.same:
        parts.append([SAME])
    if diff.notes:
        parts.append([f"- {note}" for note in diff.notes])
    for kind, changes in _groups(diff):
        if kind in _TABLES:
            parts.append(list(markdown_table(_rows(kind, changes, diff), {0})))
        else:
            # As code: a name such as __init__ would be bold.
            lines = (f"- `{where}`: {values}" for where, values in _lines(changes, diff))
            parts.append([f"**{_HEADINGS[kind]}**", "", *lines])
    return "\n\n".join("\n".join(part) for part in parts)


def diff_tables(diff: PlanDiff) -> Iterator[DiffTable]:
    """Yield the same as tables, for a page; without the notes."""
    for kind, changes in _groups(diff):
        if kind in _TABLES:
            # The first cell repeats the heading, which the page has above the table.
            (_, *header), *rows = _rows(kind, changes, diff)
            yield DiffTable(_HEADINGS[kind], [["", *header], *rows], (0,))
        else:
            lines = map(list, _lines(changes, diff))
            yield DiffTable(_HEADINGS[kind], [["", "before → after"], *lines], (0, 1))


def diff_headline(diff: PlanDiff) -> str:
    """Return in one line how many changes there are, and what the step and the bubble become."""
    if diff.same:
        return SAME
    figures = [
        f"; {change.where} {' → '.join(_pair(change, diff))}"
        for change in diff.changes
        if change.where in ("step", "bubble")
    ]
    return f"the plan differs: {counted(len(diff.changes), 'change')}{''.join(figures)}"


def _groups(diff: PlanDiff) -> Iterator[tuple[ChangeKind, list[PlanChange]]]:
    """Yield the changes that stand under one heading."""
    for kind, changes in groupby(diff.changes, _heading_kind):
        yield kind, list(changes)


def _heading_kind(change: PlanChange) -> ChangeKind:
    # The bubble is a line of the table of the step.
    return "step" if change.kind == "bubble" else change.kind


def _rows(kind: ChangeKind, changes: Sequence[PlanChange], diff: PlanDiff) -> list[list[str]]:
    """Return a table of figures: before, after, and how much that is more or less."""
    if kind == "memory":
        header = [_HEADINGS[kind], "expected", "change", "bound", "change"]
        return [header, *map(_memory_row, changes)]
    rows = [[_HEADINGS[kind], "before", "after", "change"]]
    for change in changes:
        rows.append([change.where, *_pair(change, diff), _change_text(change, diff)])
    return rows


def _memory_row(change: PlanChange) -> list[str]:
    cells = []
    for held in ("expected", "bound"):
        before, after = getattr(change.before, held), getattr(change.after, held)
        # In one cell, so that the table fits a terminal of 80 columns.
        sizes = dict.fromkeys([size_text(before), size_text(after)])
        cells += [" → ".join(sizes), _relative(before, after)]
    # Under the line of its rank, each kind of memory is indented.
    rank, number, *kind = change.where.split(" ")
    return [f"  {kind[0]}" if kind else f"{rank} {number}", *cells]


def _lines(changes: Sequence[PlanChange], diff: PlanDiff) -> Iterator[tuple[str, str]]:
    """Yield where each change is, and its values as before → after."""
    for change in changes:
        before, after = _pair(change, diff)
        if change.kind == "move":
            yield change.where, _move_text(before, after)
            continue
        relative = _change_text(change, diff)
        yield change.where, f"{before} → {after}{f' ({relative})' * bool(relative)}"


def _move_text(before: str, after: str) -> str:
    """Return where something went: stage 1 → 2, or that only one of the plans has it."""
    if not before:
        return f"added, in {_stages_text(after)}"
    return f"{_stages_text(before)} → {after}" if after else f"gone, was in {_stages_text(before)}"


def _stages_text(stages: str) -> str:
    return f"stage{'s' * (',' in stages)} {stages}"


def _pair(change: PlanChange, diff: PlanDiff) -> tuple[str, str]:
    """Return both values as people read them."""
    if _is_time(change):
        old, new = diff.time_units
        return time_with_unit(change.before, old), time_with_unit(change.after, new)
    text = _text_of(change)
    before, after = text(change.before), text(change.after)
    # A text of links has only the slowest and the fastest one.
    if before == after and change.kind == "links":
        after = "other values between some ranks"
    return before, after


def _text_of(change: PlanChange) -> Callable[[Any], str]:
    """Return how the values of a change are written."""
    match change.kind, change.where:
        case "bubble", _:
            return "{:.1%}".format
        case "move", _:
            return _stage_numbers
        case "links", _:
            return _links_text
        case _, "fingerprint":
            return _digest_text
        case "search" | "choice", "gap":
            return gap_text
        case "option", "memory":
            return _caps_text
    return _value_text


def _is_time(change: PlanChange) -> bool:
    return change.kind in ("step", "load") or change.where.endswith(("extra time", "no step below"))


def _change_text(change: PlanChange, diff: PlanDiff) -> str:
    """Return by how much a number differs; "" for what is no number."""
    if change.kind == "bubble":
        # It is a share already, and a relative change of a share would be misread.
        return f"{100 * (change.after - change.before):+.1f} points"
    if _is_time(change):
        comparable = diff.time_units[0] == diff.time_units[1]
        return _relative(change.before, change.after) if comparable else ""
    is_number = all(type(value) is int for value in (change.before, change.after))
    # The number of a stage is a name: no change of it is relative.
    is_stage = change.kind == "move" or change.where.startswith("pin ")
    return _relative(change.before, change.after) if is_number and not is_stage else ""


def _relative(before: int, after: int) -> str:
    """Return by how much a number grew, such as +8.5%; "" where it did not, or began at nothing."""
    if before == after or not before:
        return ""
    change = after / before - 1
    # What is small is not printed as none: the two values may read alike.
    return f"{change:+.1%}" if abs(change) >= 0.0005 else "<0.1%"


def _stage_numbers(stages: int | Sequence[int] | None) -> str:
    if stages is None:
        return ""
    return str(stages) if isinstance(stages, int) else ", ".join(map(str, stages))


def _digest_text(digest: str) -> str:
    return f"{digest[:_DIGEST]}…"


def _links_text(links: Links) -> str:
    return "; ".join([links_text(links), *overhead_texts(links)])


def _caps_text(caps: int | tuple[int, ...] | None) -> str:
    if caps is None:
        return "no cap"
    return ",".join(map(option_text, (caps,) if isinstance(caps, int) else caps))


def _value_text(value: Any) -> str:
    """Return a value of an option or a field: ((2, 8), (2, 4)) as 2,8; 2,4."""
    match value:
        case None | () | "":
            return "none"
        case bool():
            return "yes" if value else "no"
        case tuple():
            lists = any(isinstance(part, tuple) for part in value)
            parts = [
                ",".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value
            ]
            return ("; " if lists else ", ").join(parts)
    return str(value)
