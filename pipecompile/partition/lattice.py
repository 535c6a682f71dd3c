"""Cuts through the lattice of ideals: exact where few ideals are left, a neighbourhood of a cut where they are many.

Stage windows decide for most units on which side of a boundary they lie; only the ideals of the others are listed.
With the windows that a limit implies, no cut within the limit is missed, and the best chain is proven best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipecompile.partition.boundaries import Ideals, Listed, Rows, enumerate_ideals
from pipecompile.partition.chains import Chains
from pipecompile.partition.instance import Instance
from pipecompile.partition.windows import Limit, windows

__all__ = ["every_cut", "nearby"]

CELLS = 1 << 24  # 64-bit words that the ideals of a search may take
CELLS_NEARBY = 1 << 19


def every_cut(instance: Instance, limit: Limit, share: float = 1.0) -> Chains | None:
    """A family that holds every cut within the limit; None if a `share` of what there may be does not hold it."""
    low, high = windows(instance, limit)
    sides = [
        (np.flatnonzero(high < s), np.flatnonzero((low < s) & (high >= s)))
        for s in range(1, instance.k)
    ]
    return _family(instance, sides, int(CELLS * share))


def nearby(
    instance: Instance, order: Sequence[int], rows: Sequence[int], reach: int
) -> Chains | None:
    """A family of ideals that differ from the prefixes at `rows` of an order by units at most `reach` away in it."""
    sides, places = [], np.asarray(order, np.intp)
    for row in rows[1:-1]:
        start, stop = max(0, row - reach), min(instance.count, row + reach)
        sides.append((np.sort(places[:start]), np.sort(places[start:stop])))
    return _family(instance, sides, CELLS_NEARBY)


def _family(instance: Instance, sides: Sequence[tuple[Rows, Rows]], cells: int) -> Chains | None:
    """Per boundary all ideals of its free units on top of those that lie below it."""
    left, nothing = cells // (-(-instance.count // 64) + 6), np.zeros(0, np.intp)
    lists = list[Listed]()
    for below, free in [(nothing, nothing), *sides, (np.arange(instance.count), nothing)]:
        found = enumerate_ideals(instance, below, free, left)
        if found is None:
            return None
        left -= len(found.bits)
        lists.append(found)
    family = Ideals(instance, lists)
    return Chains(
        family, {stage: np.flatnonzero(family.origin == stage) for stage in range(1, instance.k)}
    )
