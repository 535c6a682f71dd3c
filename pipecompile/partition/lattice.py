"""Cuts through the lattice of ideals: exact where few ideals are left, a neighbourhood of a cut where they are many.

Stage windows decide for most units on which side of a boundary they lie; only the ideals of the others are listed.
With the windows that a limit implies, no cut within the limit is missed, and the best chain is proven best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipecompile.partition.boundaries import Ideals, Rows, enumerate_ideals
from pipecompile.partition.chains import Chains
from pipecompile.partition.instance import Instance
from pipecompile.partition.windows import Limit, windows

__all__ = ["CELLS_MAX", "every_cut", "nearby"]

CELLS_MAX = 1 << 24  # 64-bit words that all ideals of a search may take


def every_cut(instance: Instance, limit: Limit) -> Chains | None:
    """A family that holds every cut within the limit; None if it would be too large to list."""
    low, high = windows(instance, limit)
    sides = [(np.flatnonzero(high < s), np.flatnonzero((low < s) & (high >= s))) for s in range(1, instance.k)]
    return _family(instance, sides)


def nearby(instance: Instance, order: Sequence[int], rows: Sequence[int], reach: int) -> Chains | None:
    """A family of ideals that differ from the prefixes at `rows` of an order by units at most `reach` away in it."""
    sides, places = [], np.asarray(order, np.intp)
    for row in rows[1:-1]:
        start, stop = max(0, row - reach), min(instance.count, row + reach)
        sides.append((np.sort(places[:start]), np.sort(places[start:stop])))
    return _family(instance, sides)


def _family(instance: Instance, sides: Sequence[tuple[Rows, Rows]]) -> Chains | None:
    """Per boundary all ideals of its free units on top of those that lie below it."""
    words = -(-instance.count // 64) + 6
    left = CELLS_MAX // words
    nothing = np.zeros(0, np.intp)
    families = list[Ideals]()
    for below, free in [(nothing, nothing), *sides, (np.arange(instance.count), nothing)]:
        found = enumerate_ideals(instance, left, below=below.tolist(), free=free.tolist())
        if found is None:
            return None
        left -= len(found)
        families.append(found)
    joined = Ideals.joined(families)
    near = {s: np.flatnonzero(joined.origin == s) for s in range(1, instance.k)}
    return Chains(joined, near)
