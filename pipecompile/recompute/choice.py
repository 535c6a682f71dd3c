"""The regions of a stage: those of least extra time that fit, or those of a policy chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, sqrt

from pipecompile.memory_model.recompute_problem import Tape
from pipecompile.recompute.menus import menu
from pipecompile.recompute.region_search import Region, Regions
from pipecompile.recompute.segments import SHORTEST, segments

__all__ = [
    "Choice",
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
class Choice:
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
    tape: Tape, blocks: Sequence[str], in_flight: int, available: int, most_kept: int | None = None
) -> Choice | None:
    """The regions of least extra time whose `in_flight` microbatches, one at its peak, fit; None if none do.

    They are from the menu of the tape or those of a policy. `blocks` says of each position which block of the model it
    lies in, `available` is in bytes; no microbatch keeps more than `most_kept`.
    """
    search, choices = Regions(tape, 0, len(tape.ns)), list[Choice]()
    found = menu(tape, segments(tape, blocks), frozenset(), None if is_exact(tape) else MOST)
    ((state, front),) = (
        found.fronts.items()
    )  # nothing lives across the end of a stage but what is sent
    sent = tape.sent
    row = front.cheapest(
        in_flight,
        available - (in_flight - 1) * sent,
        None if most_kept is None else most_kept - sent,
    )
    policies = [whole(tape), per_block(tape, blocks), square_root(tape, blocks)]
    for regions in (*(() if row is None else (found.regions(state, row),)), *policies):
        if not choices or search.extra_ns(regions) < choices[-1].ns:
            choice = _priced(search, regions)
            choices += [choice] if choice.fits(in_flight, available, most_kept) else []
    return min(choices, key=lambda choice: (choice.ns, choice.kept, choice.peak), default=None)


def weighed(tape: Tape, blocks: Sequence[str], in_flight: int, ns_per_byte: float) -> Choice:
    """The regions of least cost: extra time, and so much for each byte that microbatches take, one at its peak."""
    found = menu(tape, segments(tape, blocks), frozenset(), MOST)
    ((state, front),) = found.fronts.items()
    cost = front.ns + ns_per_byte * ((in_flight - 1) * front.kept + front.peak)
    return priced(tape, found.regions(state, int(cost.argmin())))


def is_exact(tape: Tape) -> bool:
    """Whether every choice is looked at: longer tapes are put together from segments, with the choices that count."""
    return len(tape.ns) <= SHORTEST


def priced(tape: Tape, regions: Sequence[Region]) -> Choice:
    """These regions, exactly."""
    return _priced(Regions(tape, 0, len(tape.ns)), regions)


def _priced(search: Regions, regions: Sequence[Region]) -> Choice:
    _, kept, peak, ns = search.along(regions)
    return Choice(tuple(regions), ns, kept + search.tape.sent, peak)


def whole(tape: Tape) -> tuple[Region, ...]:
    """Everything that may be computed again (GPipe, arXiv 1811.06965, section 2.3)."""
    return _between(tape, [0, len(tape.ns)])


def per_block(tape: Tape, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Each block of the model by itself."""
    return _between(tape, _ends(blocks))


def square_root(tape: Tape, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Of n blocks about √n regions of √n blocks (Chen et al., arXiv 1604.06174, section 4.3)."""
    ends = _ends(blocks)
    each = ceil(sqrt(len(ends) - 1))
    return _between(tape, [*ends[:-1:each], ends[-1]])


def _ends(blocks: Sequence[str]) -> list[int]:
    """Where blocks begin, and the end."""
    lengths = [len(list(run)) for _, run in groupby(blocks)]
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def _between(tape: Tape, ends: Sequence[int]) -> tuple[Region, ...]:
    """Regions between `ends` that are boundaries, without nodes that must not be computed again."""
    allowed = [place for place in ends if place in set(tape.boundaries)]
    found: list[Region] = []
    for start, stop in pairwise(allowed):
        fixed = sorted(place for place in tape.fixed if start <= place < stop)
        edges = [start, *(edge for place in fixed for edge in (place, place + 1)), stop]
        found += [Region(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return tuple(found)
