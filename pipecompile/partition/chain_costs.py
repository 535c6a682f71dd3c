"""What a stage adds to the cost of a chain, by objective."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from pipecompile.partition.boundaries import Boundaries, Rows
from pipecompile.partition.unit_graph import Integers
from pipecompile.partition.windows import Limit

__all__ = ["ChainCost", "NoCost", "SquaresCost", "TotalCost"]

INT64_SAFE = 2**62


class ChainCost(Protocol):
    """What a stage adds to the cost of a chain, in numbers of a `kind`."""

    @property
    def kind(self) -> type:
        """The type of the numbers."""

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        """Return (len(a), len(b)): the cost of the stage between each pair of rows."""


class NoCost:
    """All chains cost zero, so that their largest load decides."""

    kind = np.int64

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        """Return zeros."""
        return np.zeros_like(load)


class TotalCost:
    """Σ load: as all chains have the same compute, the one whose transfers take least is best."""

    kind = np.int64

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        """Return the load."""
        return load


@dataclass(frozen=True)
class SquaresCost:
    """Σ load², less a constant that all chains have in common, so that the numbers stay small.

    With μ near the mean load and c the compute of a stage,

        load² = (load − μ)² + 2μ (load − c) + 2μ c − μ²

    and the last two terms have the same sum over every chain. For loads 1,000,003 and 999,997 with
    c = load the cost is 9 + 9 instead of 2 · 10¹². `kind` holds the costs: 64-bit integers, or
    Python integers if they are too large.
    """

    compute: Integers
    mean: int
    kind: type

    @staticmethod
    def of(family: Boundaries, ranks: int, paid_ns: int, limit: Limit) -> SquaresCost:
        """Return the cost for the chains of a family within a limit.

        All stages together have so many `ranks`, and each pays at most `paid_ns` to fit its memory.
        The numbers of the cost are of a kind that holds the largest sum.
        """
        problem, sums = family.unit_graph.problem, family.sums
        speeds = [problem.speed(stage) for stage in range(problem.k)]
        load = limit.load
        if load is None:
            load = _largest_load(family, ranks, min(speeds)) + paid_ns
        mean = int(sums.compute[0, -1]) // ranks
        # No stage of a chain within the limit computes more than its ranks can in that time.
        compute = int(load * max([*speeds, Fraction(1)])) * ranks
        largest = problem.k * (max(load, mean) ** 2 + 2 * mean * max(load, compute))
        return SquaresCost(sums.compute[0], mean, np.int64 if largest < INT64_SAFE else object)

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        """Return the square of each load, less what all chains have in common."""
        load = load.astype(self.kind)
        sums: Integers = self.compute.astype(self.kind)
        compute = sums[b][None, :] - sums[a][:, None]
        result: Integers = (load - self.mean) ** 2 + 2 * self.mean * (load - compute)
        return result


def _largest_load(family: Boundaries, ranks: int, slowest: Fraction) -> int:
    """Return an upper bound of the load of any stage, without what it pays for its memory.

    It takes all compute, transfers and reductions.
    """
    problem, sums = family.unit_graph.problem, family.sums
    crossing = max((int(sums.crossing[hop].max()) for hop in family.unit_graph.hops), default=0)
    spare = ranks - problem.k
    reduction = problem.reduction_ns(int(sums.parameters[-1]), spare + 1) if spare else 0
    kinds = range(len(problem.graphs))
    compute = int(max(int(sums.compute_on(kind)[0, -1]) for kind in kinds) / slowest) + 1
    return compute + 2 * crossing + reduction
