"""Which stages each unit may lie in: what it needs must fit the stages up to its own, what it feeds the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt

import numpy as np

from pipecompile.partition.instance import Instance, Integers, Mask
from pipecompile.partition.problem import Problem

__all__ = ["Limit", "windows"]

SLACK = 1 + 1e-9  # windows are found in floating point: wider than needed by more than its error


@dataclass(frozen=True)
class Limit:
    """What is no longer of interest: loads above `most`, Σ load² above `squares`.

    `crossing` is the least that any cut of interest sends over each boundary 1 … k − 1, where it is known.
    """

    most: int | None = None
    squares: int | None = None
    crossing: tuple[int, ...] = ()

    @property
    def load(self) -> int | None:
        """No rank's load is above this."""
        known = [
            limit
            for limit in (self.most, None if self.squares is None else isqrt(self.squares))
            if limit is not None
        ]
        return min(known, default=None)

    def within(self, most: int) -> Limit:
        """The same, and no load above `most`."""
        return replace(self, most=most if self.most is None else min(most, self.most))

    def allows(self, below: Integers, above: Integers, problem: Problem, boundary: int) -> Mask:
        """Whether the stages below a boundary may do so much and those above so much (at speed 1, at the least).

        What crosses other boundaries comes to it: both sides of each pay.
        """
        below = below + 2 * sum(self.crossing[: boundary - 1])
        above = above + 2 * sum(self.crossing[boundary:])
        fits = np.ones(len(below), np.bool_)
        parts = [(below.astype(np.float64), _shares(problem, 0, boundary))]
        parts.append((above.astype(np.float64), _shares(problem, boundary, problem.k)))
        if self.most is not None:
            for amount, (speed, _) in parts:
                fits &= amount <= self.most * speed * SLACK
        if self.squares is not None:
            fits &= (
                sum(amount**2 / max(squared, 1e-300) for amount, (_, squared) in parts)
                <= self.squares * SLACK
            )
        return fits


def _shares(problem: Problem, start: int, stop: int) -> tuple[float, float]:
    """Σ speed and Σ speed² of the ranks of these stages, at the most; a stage may have all spare ranks."""
    spare = (problem.replica_ranks or problem.k) - problem.k if stop > start else 0
    if problem.speeds is None and problem.ranks == problem.k:
        return float(stop - start + spare), float(stop - start + (1 + spare) ** 2 - 1)
    speeds = {problem.stage_ranks[s]: problem.speed(s) for s in range(start, stop)}
    total = sum(speeds.values(), Fraction(spare))
    squares = sum((speed**2 for speed in speeds.values()), Fraction((1 + spare) ** 2 - 1))
    return float(total), float(squares)


def windows(instance: Instance, limit: Limit) -> tuple[Integers, Integers]:
    """Per unit the first and last stage that it may lie in if the limit is to be met; exact, so a proof may use it."""
    low, high = (np.array(values, np.int64) for values in instance.windows)
    for boundary in range(1, instance.k):
        before, after = _sides(instance, limit, boundary)
        low[~before] = np.maximum(low[~before], boundary)
        high[~after] = np.minimum(high[~after], boundary - 1)
    return low, high


def _sides(instance: Instance, limit: Limit, boundary: int) -> tuple[Mask, Mask]:
    """Per unit whether it may lie before a boundary, with all that it needs, and after it, with all that it feeds."""
    problem, total = instance.problem, float(instance.compute[1].sum())
    here = limit.crossing[boundary - 1] if limit.crossing else 0
    needed, fed = instance.needed_compute + here, instance.fed_compute + here
    nothing, both = np.zeros_like(needed), total + 2 * here
    most, squares = replace(limit, squares=None), replace(limit, most=None)
    even = _even(
        limit, problem, boundary, both
    )  # what lies below may be more than this, and above more than the rest
    below, above = np.maximum(needed, even), np.maximum(fed, both - even)
    return (
        most.allows(needed, nothing, problem, boundary)
        & squares.allows(below, np.maximum(both - below, 0), problem, boundary),
        most.allows(nothing, fed, problem, boundary)
        & squares.allows(np.maximum(both - above, 0), above, problem, boundary),
    )


def _even(limit: Limit, problem: Problem, boundary: int, both: float) -> float:
    """The part of a sum that lies below a boundary where Σ load² is least, whatever comes to it on either side."""
    (_, left), (_, right) = _shares(problem, 0, boundary), _shares(problem, boundary, problem.k)
    before, after = 2 * sum(limit.crossing[: boundary - 1]), 2 * sum(limit.crossing[boundary:])
    return (both + before + after) * left / (left + right) - before
