"""Choices of regions for one stage: the cheapest that fit, and those of policies chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, sqrt

from pipecompile.memory_model.recompute_problem import RecomputeProblem
from pipecompile.recompute.menus import menu
from pipecompile.recompute.region import Region
from pipecompile.recompute.region_search import RegionSearch
from pipecompile.recompute.segments import SHORTEST, segment_cuts

__all__ = [
    "RegionChoice",
    "cheapest",
    "extra_ns",
    "is_exact",
    "per_block",
    "priced",
    "square_root",
    "weighed",
    "whole",
]

MOST = 400  # choices that a menu keeps for each state


@dataclass(frozen=True)
class RegionChoice:
    """Regions with what they cost for one microbatch.

    `ns` is the extra time, `kept` the bytes from its forward to its backward, `peak` the most bytes
    at any moment.
    """

    regions: tuple[Region, ...]
    ns: int
    kept: int
    peak: int

    def fits(self, in_flight: int, available: int, most_kept: int | None = None) -> bool:
        """Return whether `in_flight` microbatches, one at its peak, fit into `available` bytes.

        No microbatch may keep more than `most_kept` bytes, if that is given.
        """
        # Three in flight that keep 10 bytes each, of which one peaks at 25, need 2 · 10 + 25 = 45.
        keeps_little = most_kept is None or self.kept <= most_kept
        return keeps_little and (in_flight - 1) * self.kept + self.peak <= available


def cheapest(
    problem: RecomputeProblem,
    blocks: Sequence[str],
    in_flight: int,
    available: int,
    most_kept: int | None = None,
) -> RegionChoice | None:
    """Return the fitting regions of least extra time, None if none are found.

    Candidates are the regions of the stage's menu and those of the policies by hand. `blocks` names
    for each position the block of the model that it lies in. What fits is defined by
    `RegionChoice.fits`, in bytes.
    """
    search = RegionSearch(problem, 0, len(problem.forward_ns))
    # A pruned menu may have lost a choice that a simple policy has.
    candidates = [whole(problem), per_block(problem, blocks), square_root(problem, blocks)]
    from_menu = _cheapest_of_menu(problem, blocks, in_flight, available, most_kept)
    if from_menu is not None:
        candidates.insert(0, from_menu)
    choices: list[RegionChoice] = []
    for regions in candidates:
        # Time is quick to sum, the peak is not: slower candidates are not priced.
        if not choices or search.extra_ns(regions) < choices[-1].ns:
            choice = _priced(search, regions)
            if choice.fits(in_flight, available, most_kept):
                choices.append(choice)
    return min(choices, key=lambda choice: (choice.ns, choice.kept, choice.peak), default=None)


def _cheapest_of_menu(
    problem: RecomputeProblem,
    blocks: Sequence[str],
    in_flight: int,
    available: int,
    most_kept: int | None,
) -> tuple[Region, ...] | None:
    most = None if is_exact(problem) else MOST
    whole_menu = menu(problem, segment_cuts(problem, blocks), frozenset(), most)
    # Only what is sent lives across the end of a stage, so there is a single state.
    ((state, front),) = whole_menu.fronts.items()
    sent = problem.sent_bytes  # fronts count what is sent in peaks, and not in what is kept
    kept_left = None if most_kept is None else most_kept - sent
    row = front.cheapest(in_flight, available - (in_flight - 1) * sent, kept_left)
    return None if row is None else whole_menu.regions(state, row)


def weighed(
    problem: RecomputeProblem, blocks: Sequence[str], in_flight: int, ns_per_byte: float
) -> RegionChoice:
    """Return the regions of least cost: their extra time, and `ns_per_byte` for each byte.

    Bytes are those of `in_flight` microbatches, one of which is at its peak.
    """
    whole_menu = menu(problem, segment_cuts(problem, blocks), frozenset(), MOST)
    ((state, front),) = whole_menu.fronts.items()
    # No cap here: the price of a byte stands for it (see planner.py).
    cost = front.ns + ns_per_byte * ((in_flight - 1) * front.kept + front.peak)
    return priced(problem, whole_menu.regions(state, int(cost.argmin())))


def is_exact(problem: RecomputeProblem) -> bool:
    """Return whether every choice is looked at; longer stages are joined from segments' menus."""
    return len(problem.forward_ns) <= SHORTEST


def priced(problem: RecomputeProblem, regions: Sequence[Region]) -> RegionChoice:
    """Return these regions with their exact costs."""
    return _priced(RegionSearch(problem, 0, len(problem.forward_ns)), regions)


def extra_ns(problem: RecomputeProblem, regions: Sequence[Region]) -> int:
    """Return the extra time of these regions, which is quick to sum: no peak is needed for it."""
    return RegionSearch(problem, 0, len(problem.forward_ns)).extra_ns(regions)


def _priced(search: RegionSearch, regions: Sequence[Region]) -> RegionChoice:
    _, kept, peak, ns = search.along(regions)
    return RegionChoice(tuple(regions), ns, kept + search.problem.sent_bytes, peak)


def whole(problem: RecomputeProblem) -> tuple[Region, ...]:
    """Return everything that may be recomputed (GPipe, arXiv 1811.06965, section 2.3)."""
    return _between(problem, [0, len(problem.forward_ns)])


def per_block(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Return one region for each block of the model."""
    return _between(problem, _block_edges(blocks))


def square_root(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Return about √n regions of √n of the n blocks (Chen et al., arXiv 1604.06174, 4.3)."""
    edges = _block_edges(blocks)
    # 10 blocks: regions of 4, 4 and 2.
    blocks_per_region = ceil(sqrt(len(edges) - 1))
    return _between(problem, [*edges[:-1:blocks_per_region], edges[-1]])


def _block_edges(blocks: Sequence[str]) -> list[int]:
    """Return the positions where blocks begin, and the end of the last one."""
    edges = [0]
    for _, run in groupby(blocks):
        edges.append(edges[-1] + len(list(run)))
    return edges


def _between(problem: RecomputeProblem, edges: Sequence[int]) -> tuple[Region, ...]:
    """Return regions between those `edges` that are boundaries, cut around excluded nodes."""
    allowed = set(problem.boundaries)
    regions: list[Region] = []
    for start, stop in pairwise(edge for edge in edges if edge in allowed):
        begin = start
        for excluded in sorted(p for p in problem.excluded if start <= p < stop):
            regions.append(Region(begin, excluded))
            begin = excluded + 1
        regions.append(Region(begin, stop))
    return tuple(region for region in regions if region.start < region.stop)
