"""Choices that none is better than in everything: what is kept, the most that lives, and the extra time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

__all__ = ["ParetoFront", "Numbers", "joined", "pruned"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ParetoFront:
    """Choices as columns: bytes `kept` per microbatch, bytes at the `peak` of a microbatch, `ns` of extra time.

    `left` and `right` are numbers by which whoever makes choices finds out how each came about.
    """

    kept: Numbers
    peak: Numbers
    ns: Numbers
    left: Numbers
    right: Numbers

    @staticmethod
    def of(kept: int, peak: int, ns: int) -> ParetoFront:
        """A single choice."""
        return ParetoFront(*(np.array([value], dtype=np.int64) for value in (kept, peak, ns, 0, 0)))

    def __len__(self) -> int:
        return len(self.ns)

    def picked(self, rows: Sequence[int] | Numbers) -> ParetoFront:
        """Some of the choices."""
        return ParetoFront(*(getattr(self, each.name)[rows] for each in fields(self)))

    def cheapest(self, in_flight: int, available: int, most_kept: int | None = None) -> int | None:
        """The row of least time that fits: `in_flight` microbatches, of which one is at its peak."""
        held = (in_flight - 1) * self.kept + self.peak <= available
        fits = np.flatnonzero(held if most_kept is None else held & (self.kept <= most_kept))
        return int(fits[np.argmin(self.ns[fits])]) if len(fits) else None


def joined(fronts: Sequence[ParetoFront], most: int | None = None) -> ParetoFront:
    """The choices of all `fronts` that count; about `most` of them, spread out, if there are more."""
    columns = (
        np.concatenate([getattr(front, each.name) for front in fronts])
        for each in fields(ParetoFront)
    )
    return pruned(ParetoFront(*columns), most)


def pruned(front: ParetoFront, most: int | None = None) -> ParetoFront:
    """Without choices that another is as good as in everything; about `most`, if there are more."""
    rows = _undominated(front, np.arange(len(front)))
    if most is not None and len(rows) > most:
        rows = _spread(front, rows, most)
    return front.picked(rows)


def _undominated(front: ParetoFront, rows: Numbers) -> Numbers:
    """Rows from the fastest on: one stays unless an earlier one keeps no more and peaks no higher."""
    order = rows[np.lexsort((front.peak[rows], front.kept[rows], front.ns[rows]))]
    kepts: list[int] = []  # of those that stay, rising
    peaks: list[int] = []  # the lowest peak up to there, falling
    found = []
    for row, kept, peak in zip(
        order.tolist(), front.kept[order].tolist(), front.peak[order].tolist(), strict=True
    ):
        place = bisect_left(kepts, kept + 1)
        if place and peaks[place - 1] <= peak:
            continue
        found.append(row)
        first = bisect_left(kepts, kept)
        end = first
        while end < len(peaks) and peaks[end] >= peak:
            end += 1
        kepts[first:end], peaks[first:end] = [kept], [peak]
    return np.array(found, dtype=np.int64)


def _spread(front: ParetoFront, rows: Numbers, most: int) -> Numbers:
    """The fastest row of each cell of a grid over what is kept and the peak, with those that have least of either."""
    cells = max(2, int(most**0.5))
    places = [_cells(column[rows], cells) for column in (front.kept, front.peak)]
    order = np.lexsort((front.ns[rows], places[1], places[0]))
    cell = places[0][order] * cells + places[1][order]
    first = np.concatenate([[True], cell[1:] != cell[:-1]])
    least = [
        rows[np.argmin(column[rows])]
        for column in (front.kept, front.peak, front.kept + front.peak)
    ]
    return _undominated(front, np.unique(np.concatenate([rows[order[first]], least])))


def _cells(values: Numbers, cells: int) -> Numbers:
    low, high = int(values.min()), int(values.max())
    return (values - low) * (cells - 1) // max(1, high - low)
