"""Pareto fronts of choices by three costs: bytes kept, bytes at the peak, and extra time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

__all__ = ["Numbers", "ParetoFront", "merged", "pruned"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ParetoFront:
    """Choices as columns of equal length, one row a choice.

    `kept` are bytes per microbatch in flight, `peak` the bytes of a microbatch at its peak, `ns`
    the extra time. `left` and `right` are numbers by which the maker of a choice finds out how it
    came about.
    """

    kept: Numbers
    peak: Numbers
    ns: Numbers
    left: Numbers
    right: Numbers

    @staticmethod
    def of(kept: int, peak: int, ns: int) -> ParetoFront:
        """Return a front of a single choice."""
        columns = (np.array([value], dtype=np.int64) for value in (kept, peak, ns, 0, 0))
        return ParetoFront(*columns)

    def __len__(self) -> int:
        return len(self.ns)

    def rows(self, rows: Sequence[int] | Numbers) -> ParetoFront:
        """Return the choices of these rows, in this order."""
        return ParetoFront(*(getattr(self, column.name)[rows] for column in fields(self)))

    def cheapest(self, in_flight: int, available: int, most_kept: int | None = None) -> int | None:
        """Return the row of least time that fits, None if none does.

        A choice fits if `in_flight` microbatches, one of them at its peak, take at most `available`
        bytes, and if no microbatch keeps more than `most_kept` bytes.
        """
        fits = (in_flight - 1) * self.kept + self.peak <= available
        if most_kept is not None:
            fits &= self.kept <= most_kept
        rows = np.flatnonzero(fits)
        return int(rows[np.argmin(self.ns[rows])]) if len(rows) else None


def merged(fronts: Sequence[ParetoFront], most: int | None = None) -> ParetoFront:
    """Return the front of all choices in `fronts`; about `most` of them, spread out, if given."""
    columns = (
        np.concatenate([getattr(front, column.name) for front in fronts])
        for column in fields(ParetoFront)
    )
    return pruned(ParetoFront(*columns), most)


def pruned(front: ParetoFront, most: int | None = None) -> ParetoFront:
    """Return `front` without dominated choices; about `most` of the others if there are more."""
    rows = _undominated(front, np.arange(len(front)))
    if most is not None and len(rows) > most:
        rows = _spread(front, rows, most)
    return front.rows(rows)


def _undominated(front: ParetoFront, rows: Numbers) -> Numbers:
    """Return the rows that no other row beats or equals in time, kept bytes and peak.

    Rows are visited from the fastest on, so a row is dominated if and only if an earlier one keeps
    no more and peaks no higher. The earlier rows that matter form a staircase: as `kept` rises,
    `peak` falls. One look-up in it decides about a row.

        peak  ▏ 9        kepts = [2, 5, 8]
              ▏    6     peaks = [9, 6, 1]
              ▏       1  (kept 6, peak 7) is beaten by (5, 6); (kept 4, peak 3) replaces (5, 6)
              └─────────
                2  5  8  kept
    """
    order = rows[np.lexsort((front.peak[rows], front.kept[rows], front.ns[rows]))]
    kepts: list[int] = []
    peaks: list[int] = []
    undominated = []
    columns = order.tolist(), front.kept[order].tolist(), front.peak[order].tolist()
    for row, kept, peak in zip(*columns, strict=True):
        # The last step of the staircase that keeps no more: no earlier one peaks lower.
        step = bisect_left(kepts, kept + 1)
        if step and peaks[step - 1] <= peak:
            continue
        undominated.append(row)
        # The steps that this row makes superfluous: they keep no less and peak no lower.
        first = last = bisect_left(kepts, kept)
        while last < len(peaks) and peaks[last] >= peak:
            last += 1
        kepts[first:last], peaks[first:last] = [kept], [peak]
    return np.array(undominated, dtype=np.int64)


def _spread(front: ParetoFront, rows: Numbers, most: int) -> Numbers:
    """Return about `most` rows: the fastest of each cell of a grid over kept bytes and peak.

    The rows that keep least, peak least, and have the least sum of both always stay: caps that
    hardly anything fits are decided by these.
    """
    cells = max(2, int(most**0.5))
    kept_cell, peak_cell = (_cells(column[rows], cells) for column in (front.kept, front.peak))
    # By cell, and within a cell by time: the last key of lexsort counts first.
    order = np.lexsort((front.ns[rows], peak_cell, kept_cell))
    cell = kept_cell[order] * cells + peak_cell[order]
    is_first_of_cell = np.concatenate([[True], cell[1:] != cell[:-1]])
    extremes = (front.kept, front.peak, front.kept + front.peak)
    least = [rows[np.argmin(column[rows])] for column in extremes]
    return _undominated(front, np.unique(np.concatenate([rows[order[is_first_of_cell]], least])))


def _cells(values: Numbers, cells: int) -> Numbers:
    """Return for each value its cell, 0 … cells − 1, of equal widths between least and largest."""
    low, high = int(values.min()), int(values.max())
    # 0, 10, 49, 50 and 100 in 3 cells: 0 0 0 1 2. The largest value has the last cell to itself.
    return (values - low) * (cells - 1) // max(1, high - low)
