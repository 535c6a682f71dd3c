"""Rows of choices for nested regions: five costs each, and how each choice came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipecompile.recompute.pareto_front import Numbers

__all__ = [
    "BACKWARD",
    "COLUMNS",
    "FORWARD",
    "KEPT",
    "NS",
    "WRITTEN",
    "NestedRows",
    "concatenated",
    "fitting",
    "least_kept",
    "undominated",
]

KEPT, FORWARD, BACKWARD, NS, WRITTEN = COLUMNS = range(5)
"""Bytes kept, peaks of forward and backward in bytes, extra ns, bytes of buffers copied inside."""


@dataclass(frozen=True)
class NestedRows:
    """Choices, one a row: `costs` has the columns above.

    `origin` says how each came about: the number of its last step, the row before that step, and
    the row of the inner region's own choices.
    """

    costs: Numbers
    origin: Numbers

    def __len__(self) -> int:
        return len(self.costs)

    def rows(self, rows: Numbers) -> NestedRows:
        """Return the choices of these rows, in this order."""
        return NestedRows(self.costs[rows], self.origin[rows])

    @staticmethod
    def nothing() -> NestedRows:
        """Return the one choice at the begin of a level, which costs nothing yet."""
        costs = np.zeros((1, len(COLUMNS)), dtype=np.int64)
        return NestedRows(costs, np.zeros((1, 3), dtype=np.int64))


def concatenated(parts: Sequence[NestedRows]) -> NestedRows:
    """Return all choices of `parts`."""
    costs = np.concatenate([part.costs for part in parts])
    return NestedRows(costs, np.concatenate([part.origin for part in parts]))


def fitting(rows: NestedRows, available: int) -> NestedRows:
    """Return the choices none of whose bytes exceed `available` by themselves."""
    largest = rows.costs[:, [KEPT, FORWARD, BACKWARD]].max(axis=1)
    return rows.rows(np.flatnonzero(largest <= available))


def least_kept(rows: NestedRows, available: int) -> NestedRows:
    """Return the fitting choices that keep less than every faster one.

    For the stage itself only time and kept bytes decide: a peak that fits needs no room to spare.
    """
    rows = fitting(rows, available)
    costs = rows.costs
    rows = rows.rows(np.lexsort((costs[:, BACKWARD], costs[:, KEPT], costs[:, NS])))
    # Kept bytes of 50 60 40, by time, have the least so far 50 50 40. Where that falls is a row to
    # keep: the third, and the first for the 51 that is put before it.
    least = np.minimum.accumulate(rows.costs[:, KEPT])
    return rows.rows(np.flatnonzero(np.diff(least, prepend=least[:1] + 1)))


def undominated(rows: NestedRows, most: int, available: int) -> NestedRows:
    """Return the fitting choices that no other beats or equals in all costs; about `most`."""
    rows = fitting(rows, available)
    if len(rows) > most:
        rows = rows.rows(_spread(rows.costs, most))
    rows = rows.rows(np.lexsort(rows.costs.T))
    costs = rows.costs
    # Every pair at once: there are a few hundred rows at most. no_worse[i, j] says that row i costs
    # no more than row j in any column.
    no_worse = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
    equal = (costs[:, None, :] == costs[None, :, :]).all(axis=2)
    beaten_by = no_worse & (~equal | np.triu(np.ones_like(equal), 1))  # of equals the first stays
    return rows.rows(np.flatnonzero(~beaten_by.any(axis=0)))


def _spread(costs: Numbers, most: int) -> Numbers:
    """Return the fastest row of each cell of a grid over kept bytes and backward peak.

    The rows that are best in one column always stay.
    """
    # What encloses these choices may lack room for what is kept or for a backward. Of choices that
    # take about as much of both the fastest one serves.
    cells = max(2, int(most**0.5))
    cell = _cells(costs[:, KEPT], cells) * cells + _cells(costs[:, BACKWARD], cells)
    order = np.lexsort((costs[:, FORWARD], costs[:, NS], cell))
    is_first_of_cell = np.concatenate([[True], cell[order][1:] != cell[order][:-1]])
    return np.unique(np.concatenate([order[is_first_of_cell], costs.argmin(axis=0)]))


def _cells(column: Numbers, count: int) -> Numbers:
    low, high = int(column.min()), int(column.max())
    return (column - low) * count // (high - low + 1)
