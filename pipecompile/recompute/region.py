"""Regions of a stage, and the positions at which it is worth beginning and ending one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipecompile.memory_model.recompute_problem import RecomputeProblem

__all__ = ["Region", "RegionEnds"]


class Region(NamedTuple):
    """The nodes at positions `start` … `stop` − 1, which are recomputed together."""

    start: int
    stop: int


@dataclass(frozen=True)
class RegionEnds:
    """The positions where a region may begin and stop without being worse than a shorter region.

    `regions` lists every pair of a begin and a later stop with no excluded node in between.
    """

    begins: frozenset[int]
    stops: frozenset[int]
    regions: tuple[Region, ...]

    @staticmethod
    def of(problem: RecomputeProblem) -> RegionEnds:
        """Return the useful ends among the boundaries of `problem`.

        Boundaries cut the stage into units that are recomputed as a whole or not at all:

            boundaries   0       3     5           9
            units        [0 1 2] [3 4] [5 6 7 8]
                         saves   –     saves

        A region that stops after a unit without saved tensors (position 5 here) frees nothing by
        that unit, so it may as well stop before it. One that begins with a unit that neither saves
        nor produces a tensor may as well begin after it.
        """
        producers = {tensor.producer for tensor in problem.tensors}
        begins, stops = list[int](), list[int]()
        for start, stop in pairwise(sorted(problem.boundaries)):
            saves = any(problem.saves_at[position] != "never" for position in range(start, stop))
            if saves:
                stops.append(stop)
            if saves or not producers.isdisjoint(range(start, stop)):
                begins.append(start)
        regions = []
        for begin in begins:
            # No region reaches past the next node that must not be recomputed.
            length = len(problem.forward_ns)
            limit = min((place for place in problem.excluded if place >= begin), default=length)
            regions += [Region(begin, stop) for stop in stops if begin < stop <= limit]
        return RegionEnds(frozenset(begins), frozenset(stops), tuple(regions))
