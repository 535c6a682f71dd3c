"""The table of the dynamic program over chains of boundaries: one layer per number of stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.unit_graph import Integers, Mask

__all__ = ["Layer"]


@dataclass(frozen=True)
class Layer:
    """Per row of a band the best chain of stages so far that ends in the row's ideal.

    `total` is the cost of the chain and `peak` its largest load; both are undefined unless
    `reached`. `previous` is the row of the band before that its last stage begins at, and
    `replicas` the number of ranks of that stage: from these the chain is read backwards.
    """

    total: Integers
    peak: Integers
    reached: Mask
    previous: NDArray[np.intp]
    replicas: NDArray[np.intp]

    @staticmethod
    def start(kind: type) -> Layer:
        """Return the layer of the empty chain; costs are held in numbers of this `kind`."""
        layer = Layer.empty(1, kind)
        layer.reached[0] = True
        return layer

    @staticmethod
    def empty(count: int, kind: type) -> Layer:
        """Return a layer of `count` rows, none of them reached."""
        return Layer(
            total=np.zeros(count, kind),
            peak=np.zeros(count, np.int64),
            reached=np.zeros(count, np.bool_),
            previous=np.zeros(count, np.intp),
            replicas=np.zeros(count, np.intp),
        )

    def improve(
        self,
        columns: Rows,
        before: Layer,
        rows: Rows,
        replicas: int,
        cost: Integers,
        load: Integers,
        fits: Mask,
    ) -> None:
        """Extend the chains of `before` by one stage, in place, where that is better.

        `cost`, `load` and `fits` are of the stages from `rows` of the band before to `columns` of
        this one: (len(rows), len(columns)). A chain is better by its total cost, then by its
        largest load; of equal chains the first one stays.
        """
        fits = fits & before.reached[rows][:, None]
        if not fits.any():
            return
        # Of all rows that reach a column the least total, and of these the least peak.
        total = before.total[rows][:, None] + cost
        # Not infinity: totals are integers, and Python's own where 64 bits are too few.
        total[~fits] = total[fits].max() + 1
        least = total.min(axis=0)
        # Only among rows of least total does the peak decide.
        peak = np.maximum(before.peak[rows][:, None], load)
        peak[total != least] = peak.max() + 1
        best_row = peak.argmin(axis=0)
        least_peak = peak[best_row, np.arange(len(columns))]

        old_total, old_peak = self.total[columns], self.peak[columns]
        is_less = (least < old_total) | ((least == old_total) & (least_peak < old_peak))
        improves = fits.any(axis=0) & (~self.reached[columns] | is_less)
        chosen = columns[improves]
        self.total[chosen] = least[improves]
        self.peak[chosen] = least_peak[improves]
        self.previous[chosen] = rows[best_row[improves]]
        self.replicas[chosen] = replicas
        self.reached[chosen] = True
