"""The regions of a stage: those of least extra time that fit, or those of a policy chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, sqrt

from pipecompile.memory_model.recompute_problem import RecomputeProblem
from pipecompile.recompute.menus import menu
from pipecompile.recompute.region_search import Region, RegionSearch
from pipecompile.recompute.segments import SHORTEST, segments

__all__ = [
    "RegionChoice",
    "cheapest",
    "is_exact",
    "per_block",
    "priced",
    "square_root",
    "weighed",
    "whole",
]

MOST = 400  # choices that are kept for each state


@dataclass(frozen=True)
class RegionChoice:
    """Regions, by what they cost: extra time, bytes kept of each microbatch in flight, and the peak of one."""

    regions: tuple[Region, ...]
    ns: int
    kept: int
    peak: int

    def fits(self, in_flight: int, available: int, most_kept: int | None = None) -> bool:
        """Whether so many microbatches, one at its peak, take no more bytes, and each keeps no more than it may."""
        return (in_flight - 1) * self.kept + self.peak <= available and (
            most_kept is None or self.kept <= most_kept
        )


def cheapest(
    problem: RecomputeProblem,
    blocks: Sequence[str],
    in_flight: int,
    available: int,
    most_kept: int | None = None,
) -> RegionChoice | None:
    """The regions of least extra time whose `in_flight` microbatches, one at its peak, fit; None if none do.

    They are from the menu of the tape or those of a policy. `blocks` says of each position which block of the model it
    lies in, `available` is in bytes; no microbatch keeps more than `most_kept`.
    """
    search, choices = RegionSearch(problem, 0, len(problem.ns)), list[RegionChoice]()
    found = menu(
        problem, segments(problem, blocks), frozenset(), None if is_exact(problem) else MOST
    )
    ((state, front),) = (
        found.fronts.items()
    )  # nothing lives across the end of a stage but what is sent
    sent = problem.sent
    row = front.cheapest(
        in_flight,
        available - (in_flight - 1) * sent,
        None if most_kept is None else most_kept - sent,
    )
    policies = [whole(problem), per_block(problem, blocks), square_root(problem, blocks)]
    for regions in (*(() if row is None else (found.regions(state, row),)), *policies):
        if not choices or search.extra_ns(regions) < choices[-1].ns:
            choice = _priced(search, regions)
            choices += [choice] if choice.fits(in_flight, available, most_kept) else []
    return min(choices, key=lambda choice: (choice.ns, choice.kept, choice.peak), default=None)


def weighed(
    problem: RecomputeProblem, blocks: Sequence[str], in_flight: int, ns_per_byte: float
) -> RegionChoice:
    """The regions of least cost: extra time, and so much for each byte that microbatches take, one at its peak."""
    found = menu(problem, segments(problem, blocks), frozenset(), MOST)
    ((state, front),) = found.fronts.items()
    cost = front.ns + ns_per_byte * ((in_flight - 1) * front.kept + front.peak)
    return priced(problem, found.regions(state, int(cost.argmin())))


def is_exact(problem: RecomputeProblem) -> bool:
    """Whether every choice is looked at: longer tapes are put together from segments, with the choices that count."""
    return len(problem.ns) <= SHORTEST


def priced(problem: RecomputeProblem, regions: Sequence[Region]) -> RegionChoice:
    """These regions, exactly."""
    return _priced(RegionSearch(problem, 0, len(problem.ns)), regions)


def _priced(search: RegionSearch, regions: Sequence[Region]) -> RegionChoice:
    _, kept, peak, ns = search.along(regions)
    return RegionChoice(tuple(regions), ns, kept + search.problem.sent, peak)


def whole(problem: RecomputeProblem) -> tuple[Region, ...]:
    """Everything that may be computed again (GPipe, arXiv 1811.06965, section 2.3)."""
    return _between(problem, [0, len(problem.ns)])


def per_block(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Each block of the model by itself."""
    return _between(problem, _ends(blocks))


def square_root(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Of n blocks about √n regions of √n blocks (Chen et al., arXiv 1604.06174, section 4.3)."""
    ends = _ends(blocks)
    each = ceil(sqrt(len(ends) - 1))
    return _between(problem, [*ends[:-1:each], ends[-1]])


def _ends(blocks: Sequence[str]) -> list[int]:
    """Where blocks begin, and the end."""
    lengths = [len(list(run)) for _, run in groupby(blocks)]
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def _between(problem: RecomputeProblem, ends: Sequence[int]) -> tuple[Region, ...]:
    """Regions between `ends` that are boundaries, without nodes that must not be computed again."""
    allowed = [place for place in ends if place in set(problem.boundaries)]
    found: list[Region] = []
    for start, stop in pairwise(allowed):
        fixed = sorted(place for place in problem.fixed if start <= place < stop)
        edges = [start, *(edge for place in fixed for edge in (place, place + 1)), stop]
        found += [Region(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return tuple(found)
