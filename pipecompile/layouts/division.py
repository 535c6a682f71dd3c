"""How each format divides a model into pieces, and the text for the stages of the pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

from pipecompile.errors import InputError
from pipecompile.ir.plan import LayoutFormat, Plan
from pipecompile.layouts.export_text import lists_text, mapping_text, prefixes_of
from pipecompile.layouts.layers import LayerList, ancestors, lies_in
from pipecompile.layouts.layout import BEGINNING, END
from pipecompile.layouts.megatron import megatron_text
from pipecompile.layouts.pieces import Piece
from pipecompile.layouts.rows import (
    PlanRow,
    layers_of_rows,
    stages_by_path,
    with_parameters,
)
from pipecompile.layouts.sections import ATTENTION, MLP, Section, in_halves, sections_of

__all__ = ["DIVISIONS", "Division"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Division:
    """The pieces of a model in the order of the forward, and the text for their stages.

    With `in_order` the format says the order of pieces only, so that stages must follow it.
    """

    pieces: list[Piece]
    text: Callable[[Sequence[int]], str]
    in_order: bool


def _pieces(
    keyed: Iterable[tuple[Key, PlanRow]],
    name: Callable[[Key], str],
    ends: Callable[[Key], tuple[int, int]],
) -> dict[Key, Piece]:
    """Return the pieces of rows under the same key."""
    ns: dict[Key, dict[int, int]] = {}
    for key, row in keyed:
        by_stage = ns.setdefault(key, {})
        # A piece in several stages is one that the cut divides: rounding weighs what it has in
        # each.
        by_stage[row.stage] = by_stage.get(row.stage, 0) + row.ns
    return {key: Piece(name(key), by_stage, *ends(key)) for key, by_stage in ns.items()}


# Symbols: E t m L, halves of layers, and counts of layers


def _by_sections(
    form: LayoutFormat, plan: Plan, rows: list[PlanRow], container: str | None
) -> Division:
    layers = layers_of_rows(rows, container)
    modules = [row.module for row in rows]
    sections = sections_of(modules, with_parameters(plan), layers)
    if form == "megatron-hybrid":
        sections = in_halves(modules, sections, layers)
    keyed = [(key, row) for key, row in zip(sections, rows, strict=True) if key is not None]
    anywhere = (0, plan.k - 1)
    # Counts and patterns are of layers alone: what is around them lies at the ends.
    last = (plan.k - 1, plan.k - 1)
    at_ends = {} if form == "megatron" else {"E": (0, 0), "m": last, "L": last}
    pieces = _pieces(keyed, str, lambda key: at_ends.get(key.symbol, anywhere))
    # By symbol and not by place: a graph may compute a part of L, such as the norm, before an MTP
    # layer.
    order = sorted(pieces, key=_order)
    experts = {key.number for key, row in keyed if key.symbol == MLP and "expert" in row.module}
    text = partial(_symbols_text, form, order, experts, plan.k)
    return Division([pieces[key] for key in order], text, in_order=True)


def _order(section: Section) -> tuple[int, int, int]:
    """Return what sorts sections in the order of a layout: E, layers or their halves, m, L."""
    rank = {"E": 0, "t": 1, ATTENTION: 1, MLP: 1, "m": 2, "L": 3}[section.symbol]
    return rank, section.number, section.symbol == MLP


def _symbols_text(
    form: LayoutFormat, order: list[Section], experts: set[int], k: int, stages: Sequence[int]
) -> str:
    rows: list[list[Section]] = [[] for _ in range(k)]
    for section, stage in zip(order, stages, strict=True):
        rows[stage].append(section)
    if form == "megatron":
        return megatron_text([[section.symbol for section in row] for row in rows])
    if form == "megatron-hybrid":
        return "|".join("".join(_half(section, experts) for section in row) for row in rows)
    counts = (str(sum(section.symbol == "t" for section in row)) for row in rows)
    return f"{form.upper()}_PP_LAYER_PARTITION={','.join(counts)}"


def _half(section: Section, experts: set[int]) -> str:
    """Return the symbol of a half of a layer; "" for what is not in a layer."""
    mlp = "E" if section.number in experts else "-"
    return {ATTENTION: "*", MLP: mlp}.get(section.symbol, "")


# Modules by their paths


def _by_modules(
    form: LayoutFormat, plan: Plan, rows: list[PlanRow], container: str | None
) -> Division:
    """Return the pieces of torchtitan (layers, and modules with parameters around them) or of a
    device map (all modules that have no others in them).
    """
    leaves = _leaves(plan, rows)
    keys: list[str | None] = [row.module if row.module in leaves else None for row in rows]
    if form == "torchtitan":
        layers = layers_of_rows(rows, container)
        keys = [_titan_module(row.module, layers, leaves) for row in rows]
    keyed = [(key, row) for key, row in zip(keys, rows, strict=True) if key is not None]
    pieces = _pieces(keyed, lambda key: f"module {key}", lambda key: (0, plan.k - 1))
    order = list(pieces)

    def text(stages: Sequence[int]) -> str:
        stage_of = dict(zip(order, stages, strict=True))
        if form == "torchtitan":
            parts = [[key for key in order if stage_of[key] == stage] for stage in range(plan.k)]
            return f"module_fqns_per_model_part={lists_text(parts)}"
        moved = [
            row if key is None else row._replace(stage=stage_of[key])
            for key, row in zip(keys, rows, strict=True)
        ]
        return mapping_text({path: str(stage) for path, stage in prefixes_of(moved).items()})

    return Division(list(pieces.values()), text, in_order=False)


def _titan_module(module: str, layers: LayerList, leaves: Collection[str]) -> str | None:
    """Return what torchtitan names of a module: its layer, or itself; None for nothing."""
    for path in (*layers.layers, *layers.mtp):
        if lies_in(module, path):
            return path
    return module if module in leaves else None


def _leaves(plan: Plan, rows: Sequence[PlanRow]) -> frozenset[str]:
    """Return the modules without others in them that have parameters or lie in one stage.

    An activation without parameters that all layers share lies in many stages, and is not named.
    """
    stages = stages_by_path(rows)
    around = {path for row in rows for path in ancestors(row.module)[1:]}
    own = with_parameters(plan)
    return frozenset(
        path for path in stages.keys() - around if path and (path in own or len(stages[path]) == 1)
    )


# Split points, which are places in the order of the forward

Points = dict[int, dict[str, str]]
"""By place the modules that begin or end there, with the point of each, the best one first."""


def _by_splits(
    form: LayoutFormat, plan: Plan, rows: list[PlanRow], container: str | None
) -> Division:
    points = _split_points(rows)
    # With splits possible at 4 and 9 the rows fall into the pieces 0 to 3, 4 to 8, and 9 onwards.
    begins = [0, *sorted(points.keys() - {0})]
    leaves = _leaves(plan, rows)
    keyed = [
        (begins[bisect_right(begins, row.place) - 1], row) for row in rows if row.module in leaves
    ]
    pieces = _pieces(keyed, partial(_name_at, points), ends=lambda begin: (0, plan.k - 1))
    order = sorted(pieces)
    text = partial(_splits_text, rows, points, order)
    return Division([pieces[begin] for begin in order], text, in_order=True)


def _name_at(points: Points, place: int) -> str:
    """Return what begins at a place, for messages."""
    for module, point in points.get(place, {}).items():
        return f"module {module}" if point == BEGINNING else f"what follows module {module}"
    return "the beginning of the model"


def _splits_text(
    rows: Sequence[PlanRow], points: Points, order: Sequence[int], stages: Sequence[int]
) -> str:
    cuts: dict[str, str] = {}
    for (left, stage), (right, following) in pairwise(zip(order, stages, strict=True)):
        if stage == following:
            continue
        # A mapping has each module once, so none can have a cut at both ends.
        free = [
            (_misplaced(rows, place, left, right, stage), -place, module)
            for place in range(left + 1, right + 1)
            for module in points.get(place, {})
            if module not in cuts
        ]
        if not free:
            raise InputError(
                f"a split-spec names each module once, and cannot cut before and after "
                f"{next(iter(points[right]))}; export to json"
            )
        # Fewest rows on the wrong side, then the latest place, then the outermost module that
        # begins there.
        _, place, module = min(free, key=lambda choice: choice[:2])
        cuts[module] = f"SplitPoint.{points[-place][module]}"
    return mapping_text(cuts)


def _split_points(rows: Sequence[PlanRow]) -> Points:
    """Return the places at which a split can lie.

    The beginning of a module is preferred to the end of another one, and an outer one to an inner.
    """
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for row in rows:
        for path in ancestors(row.module)[:-1]:
            begins.setdefault(path, row.place)
            ends[path] = row.place + len(row.nodes)
    points: Points = {}
    # This order of insertion is the preference: readers take the first name of a place.
    for where, point in ((begins, BEGINNING), (ends, END)):
        for path in sorted(where, key=lambda path: path.count(".")):
            points.setdefault(where[path], {}).setdefault(path, point)
    return points


def _misplaced(rows: Sequence[PlanRow], place: int, left: int, right: int, stage: int) -> int:
    """Return how many rows between two places a split at `place` puts on another side of the
    boundary behind `stage` than the plan.
    """
    between = [row for row in rows if left <= row.place < right]
    return sum((row.place < place) != (row.stage <= stage) for row in between)


DIVISIONS: dict[LayoutFormat, Callable[[Plan, list[PlanRow], str | None], Division]] = {
    "megatron": partial(_by_sections, "megatron"),
    "megatron-hybrid": partial(_by_sections, "megatron-hybrid"),
    "vllm": partial(_by_sections, "vllm"),
    "sglang": partial(_by_sections, "sglang"),
    "torchtitan": partial(_by_modules, "torchtitan"),
    "device-map": partial(_by_modules, "device-map"),
    "split-spec": partial(_by_splits, "split-spec"),
}
