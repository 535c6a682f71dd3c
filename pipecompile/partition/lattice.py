"""Parts of the lattice of ideals: all that a limit leaves, or the neighbourhood of a cut.

Windows (see `windows`) decide for most units on which side of a boundary they lie. Only the ideals
of the other units are enumerated:

    unit      0  1  2  3  4  5  6  7        boundary 2
    window    0  0  01 1  12 12 2  2
              └ below ──┘ └free┘ └above┘    of 8 units 2 are free: at most 4 ideals, not 256

With the windows that a limit implies, no cut within the limit is missed, and the best chain is
proven best. Where too many ideals are left, only those near a known cut are enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.chains import Chains
from pipecompile.partition.ideals import IdealList, Ideals, enumerate_ideals
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.windows import Limit, windows

__all__ = ["Sides", "every_cut", "nearby_cuts", "nearby_sides"]

WORDS_MAX = 1 << 24  # 64-bit words that the ideals of a search may take
NEARBY_WORDS_MAX = 1 << 19
WORDS_OF_SUMS = 6  # per ideal, besides its bits


class Sides(NamedTuple):
    """The units that lie below a boundary, and those that may lie on either side."""

    below: Rows
    free: Rows


def every_cut(unit_graph: UnitGraph, limit: Limit, share: float = 1.0) -> Chains | None:
    """Return the chains of a family that has every cut within the limit.

    It is None if the family does not fit into a `share` of the most memory.
    """
    low, high = windows(unit_graph, limit)
    sides = [
        Sides(np.flatnonzero(high < s), np.flatnonzero((low < s) & (high >= s)))
        for s in range(1, unit_graph.k)
    ]
    return _chains_between(unit_graph, sides, int(WORDS_MAX * share))


def nearby_sides(
    unit_graph: UnitGraph, order: Sequence[int], rows: Sequence[int], reach: int
) -> list[Sides]:
    """Return the sides of the boundaries near the prefixes of an order that end at `rows` (0 … k).

    Units at most `reach` places from a boundary may change its side. Orders that differ in other
    places only have the same sides.
    """
    sides, places = [], np.asarray(order, np.intp)
    for row in rows[1:-1]:
        start, stop = max(0, row - reach), min(unit_graph.count, row + reach)
        sides.append(Sides(np.sort(places[:start]), np.sort(places[start:stop])))
    return sides


def nearby_cuts(unit_graph: UnitGraph, sides: Sequence[Sides]) -> Chains | None:
    """Return the chains of the ideals that these sides leave; None if they are too many."""
    return _chains_between(unit_graph, sides, NEARBY_WORDS_MAX)


def _chains_between(unit_graph: UnitGraph, inner: Sequence[Sides], words: int) -> Chains | None:
    """Return the chains whose boundaries 1 … k − 1 have these sides.

    It is None if their ideals take more than `words`.
    """
    ideals_left = words // (-(-unit_graph.count // 64) + WORDS_OF_SUMS)
    nothing, everything = np.zeros(0, np.intp), np.arange(unit_graph.count)
    # The first and the last boundary are fixed: nothing before, everything before.
    lists = list[IdealList]()
    for below, free in (Sides(nothing, nothing), *inner, Sides(everything, nothing)):
        ideals = enumerate_ideals(unit_graph, below, free, ideals_left)
        if ideals is None:
            return None
        ideals_left -= len(ideals.bits)
        lists.append(ideals)
    family = Ideals(unit_graph, lists)
    near = {s: np.flatnonzero(family.origin == s) for s in range(1, unit_graph.k)}
    return Chains(family, near)
