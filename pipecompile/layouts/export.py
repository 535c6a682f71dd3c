"""Plans in the words of other frameworks: a cut as a text.

Read back, all that the text names lies in the stages that it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipecompile.errors import InputError
from pipecompile.ir.plan import LAYOUT_FORMATS, LayoutFormat, Plan
from pipecompile.layouts.division import DIVISIONS, Division
from pipecompile.layouts.export_text import json_text
from pipecompile.layouts.pieces import Piece, rounded_stages, whole_stages
from pipecompile.layouts.rows import PlanRow, rows_of

__all__ = ["Exported", "export_layout"]


@dataclass(frozen=True)
class Exported:
    """A layout as a text; where it was rounded, which pieces moved, and the time of forward and
    backward in the heaviest stage, before and after.
    """

    text: str
    moved: tuple[str, ...] = ()
    heaviest_ns: int = 0
    rounded_heaviest_ns: int = 0


def export_layout(
    plan: Plan, form: LayoutFormat, container: str | None = None, *, rounded: bool = False
) -> Exported:
    """Return the cut of a plan in the words of `form`.

    The stage of every piece that the format names (layers, modules with parameters; in json all
    nodes) is that of the plan. What lies in between follows the data flow, as in the framework.
    InputError if the format cannot say the cut, unless it may be `rounded`. `container` is the path
    of the list of layers, which is found unless given.
    """
    rows = rows_of(plan)
    if form == "json":
        return Exported(json_text(rows, plan.k))
    division = DIVISIONS[form](plan, rows, container)
    stages = whole_stages(division.pieces, plan.k, in_order=division.in_order)
    if not isinstance(stages, str):
        return Exported(division.text(stages))
    if not rounded:
        raise InputError(
            f"a layout for {form} cannot say this cut: {stages}; export to "
            f"{' or '.join(_exact_formats(plan, rows, container))}, or round it (--round)"
        )
    return _rounded(division, rows, plan.k)


def _exact_formats(plan: Plan, rows: list[PlanRow], container: str | None) -> list[str]:
    """Return the formats in which the cut of a plan can be written."""
    able: list[str] = []
    for form in LAYOUT_FORMATS:
        if form == "json":
            able.append(form)
            continue
        try:
            division = DIVISIONS[form](plan, rows, container)
        except InputError:  # the model has no such parts
            continue
        if not isinstance(whole_stages(division.pieces, plan.k, in_order=division.in_order), str):
            able.append(form)
    return able


def _rounded(division: Division, rows: Sequence[PlanRow], k: int) -> Exported:
    pieces = [_movable(piece) for piece in division.pieces]
    stages = rounded_stages(pieces, k)
    loads = Counter[int]()
    for row in rows:
        loads[row.stage] += row.ns
    before = max(loads.values())
    moved = []
    for piece, stage in zip(pieces, stages, strict=True):
        # A layer of 3 ms in stage 0 and 1 ms in stage 1 that is moved to 0 takes 1 ms from one to
        # the other. What no piece has stays where the plan has it.
        for left, ns in piece.ns_by_stage.items():
            loads[left] -= ns
            loads[stage] += ns
        if set(piece.ns_by_stage) != {stage}:
            moved.append(f"{piece.name} to stage {stage}")
    return Exported(division.text(stages), tuple(moved), before, max(loads.values()))


def _movable(piece: Piece) -> Piece:
    """Return the piece with the stages among which rounding may choose."""
    first, last = min(piece.ns_by_stage), max(piece.ns_by_stage)
    if piece.last < first or last < piece.first:
        return piece  # it can lie at one end only, and does not: it goes there
    return replace(piece, first=max(first, piece.first), last=min(last, piece.last))
