"""Where regions may begin and stop, but for places that other places are never worse than."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipecompile.memory_model.recompute_problem import RecomputeProblem

__all__ = ["RegionEnds", "Region"]


class Region(NamedTuple):
    """The nodes at positions `start` … `stop` − 1, computed again."""

    start: int
    stop: int


@dataclass(frozen=True)
class RegionEnds:
    """Where regions may begin and stop that some choice may need: at other ends are nodes better left out of them."""

    begins: frozenset[int]
    stops: frozenset[int]
    regions: tuple[Region, ...]

    @staticmethod
    def of(problem: RecomputeProblem) -> RegionEnds:
        """Those between boundaries.

        The nodes up to the next boundary save or make something, or a region may as well begin after them. Those from
        the boundary before save something, or it may as well end before them.
        """
        made = {held.made for held in problem.held}
        pairs = list(pairwise(sorted(problem.boundaries)))
        saving = [any(problem.packs[place] != "never" for place in range(*pair)) for pair in pairs]
        begins = [
            a
            for (a, b), saves in zip(pairs, saving, strict=True)
            if saves or not made.isdisjoint(range(a, b))
        ]
        stops = [b for (_, b), saves in zip(pairs, saving, strict=True) if saves]
        ends = {
            a: min((place for place in problem.fixed if place >= a), default=len(problem.ns))
            for a in begins
        }
        regions = tuple(Region(a, b) for a in begins for b in stops if a < b <= ends[a])
        return RegionEnds(frozenset(begins), frozenset(stops), regions)
