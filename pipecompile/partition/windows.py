"""Stage windows: which stages each unit may lie in if a cut is to be within a limit.

All predecessors of a unit must fit into the stages up to its own, and all successors into the
stages from its own on. With k = 4 and no load above 10, a unit that needs 25 ns of compute, itself
included, lies in stage 2 at the earliest, since two stages hold only 20.

Windows leave most units only one or two stages, which keeps the lattice of ideals small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from typing import NamedTuple

import numpy as np

from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import Integers, Mask, UnitGraph

__all__ = ["Limit", "windows"]

SLACK = 1 + 1e-9  # above the error of floating-point numbers, so that windows are never too narrow
TINY = 1e-300  # in place of a zero that is divided by


@dataclass(frozen=True)
class Limit:
    """The cuts of interest: no load above `most`, and Σ load² not above `squares`.

    `crossing` has, for each boundary 1 … k − 1, a lower bound of the transfer time over it in any
    cut of interest; empty if none is known.
    """

    most: int | None = None
    squares: int | None = None
    crossing: tuple[int, ...] = ()

    @property
    def load(self) -> int | None:
        """The largest load of a rank that the limit allows; None without a limit."""
        from_squares = None if self.squares is None else isqrt(self.squares)
        known = [load for load in (self.most, from_squares) if load is not None]
        return min(known, default=None)

    def within(self, most: int) -> Limit:
        """Return the same limit, and no load above `most`."""
        return replace(self, most=most if self.most is None else min(most, self.most))

    def allows(
        self, below: Integers, above: Integers, problem: PartitionProblem, boundary: int
    ) -> Mask:
        """Return whether the sides of a boundary may take these times.

        `below` ns are the time of the stages below the boundary, `above` ns that of the stages
        above it.

        Both are lower bounds at speed 1. What crosses the other boundaries is added here: both
        sides of each pay for it. Loads of n stages that sum to x have a maximum of x / n at least,
        and by Cauchy and Schwarz Σ load² ≥ x² / n.
        """
        # With 5, 7 and 3 ns over three boundaries, the sides of the second one get 10
        # and 6 ns more. What crosses that one itself is in `below` and `above` already.
        below = below + 2 * sum(self.crossing[: boundary - 1])
        above = above + 2 * sum(self.crossing[boundary:])
        fits = np.ones(len(below), np.bool_)
        sides = [
            (below.astype(np.float64), _shares(problem, 0, boundary)),
            (above.astype(np.float64), _shares(problem, boundary, problem.k)),
        ]
        if self.most is not None:
            for amount, shares in sides:
                fits &= amount <= self.most * shares.total * SLACK
        if self.squares is not None:
            squares = sum(amount**2 / max(shares.squares, TINY) for amount, shares in sides)
            fits &= squares <= self.squares * SLACK
        return fits


class _Shares(NamedTuple):
    """Σ speed and Σ speed² of some ranks, at most."""

    total: float
    squares: float


def _shares(problem: PartitionProblem, start: int, stop: int) -> _Shares:
    """Return the shares of the ranks of stages start … stop − 1.

    One stage may have all spare replicas.
    """
    spare = (problem.replica_ranks or problem.k) - problem.k if stop > start else 0
    # n stages of speed 1, one of them with `spare` replicas more: n − 1 ones and 1 + spare.
    more_squares = (1 + spare) ** 2 - 1
    if problem.speeds is None and problem.ranks == problem.k:
        return _Shares(float(stop - start + spare), float(stop - start + more_squares))
    speeds = {problem.stage_ranks[s]: problem.speed(s) for s in range(start, stop)}
    total = sum(speeds.values(), Fraction(spare))
    squares = sum((speed**2 for speed in speeds.values()), Fraction(more_squares))
    return _Shares(float(total), float(squares))


def windows(unit_graph: UnitGraph, limit: Limit) -> tuple[Integers, Integers]:
    """Return, per unit, the first and last stage that it may lie in if the limit is met.

    No cut within the limit is lost, so that a proof may use the windows. Where low > high, there is
    no such cut.
    """
    low, high = (np.array(stages, np.int64) for stages in unit_graph.pin_windows)
    for boundary in range(1, unit_graph.k):
        may_be_before, may_be_after = _sides(unit_graph, limit, boundary)
        low[~may_be_before] = np.maximum(low[~may_be_before], boundary)
        high[~may_be_after] = np.minimum(high[~may_be_after], boundary - 1)
    return low, high


def _sides(unit_graph: UnitGraph, limit: Limit, boundary: int) -> tuple[Mask, Mask]:
    """Return, per unit, on which sides of a boundary it may lie.

    The first mask says whether it and its predecessors may lie before the boundary, the second one
    whether it and its successors may lie after it.
    """
    problem, total = unit_graph.problem, float(unit_graph.compute[1].sum())
    here = limit.crossing[boundary - 1] if limit.crossing else 0
    needed, fed = unit_graph.needed_compute + here, unit_graph.fed_compute + here
    nothing, both = np.zeros_like(needed), total + 2 * here
    most, squares = replace(limit, squares=None), replace(limit, most=None)
    # Where more than the needed compute lies below the boundary, Σ load² may be less: it is least
    # at the even split. So the bound takes the even split for units that need less than that.
    even = _even_split(limit, problem, boundary, both)
    below, above = np.maximum(needed, even), np.maximum(fed, both - even)
    may_be_before = most.allows(needed, nothing, problem, boundary) & squares.allows(
        below, np.maximum(both - below, 0), problem, boundary
    )
    may_be_after = most.allows(nothing, fed, problem, boundary) & squares.allows(
        np.maximum(both - above, 0), above, problem, boundary
    )
    return may_be_before, may_be_after


def _even_split(limit: Limit, problem: PartitionProblem, boundary: int, both: float) -> float:
    """Return the part of `both` sides' time below a boundary where Σ load² is least.

    That is where both sides have equal loads, with what crosses their other boundaries included.
    """
    left = _shares(problem, 0, boundary).squares
    right = _shares(problem, boundary, problem.k).squares
    before = 2 * sum(limit.crossing[: boundary - 1])
    after = 2 * sum(limit.crossing[boundary:])
    return (both + before + after) * left / (left + right) - before
