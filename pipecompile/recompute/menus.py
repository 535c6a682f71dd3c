"""Choices of regions for long tapes: cut into segments, solved once for each that is alike, and put together.

A segment is about a block of the model. Its choices (its menu) hang on nothing outside but on which storages it reads
that are kept already, so blocks that are alike share one. Two neighbours are put together by adding what they keep
and what they take; the peak is that of either, with what lies before it kept. In a run of segments that is put
together, the whole run may also be one region.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.pareto_front import ParetoFront, joined
from pipecompile.recompute.region_search import Region, RegionSearch, State

__all__ = ["Menu", "menu"]

WHOLE = -1  # instead of a number of a part: all nodes are one region


class MenuPart(NamedTuple):
    """Choices of the left one in a state, with those of the right one that follow."""

    left: State
    right: State
    end: State


@dataclass(frozen=True)
class Menu:
    """The choices for a tape by what is kept across its end, of storages by their index in the tape."""

    fronts: dict[State, ParetoFront]
    alone: RegionSearch | None = None
    left: Menu | None = None
    rights: dict[State, Menu] = field(default_factory=dict)
    parts: list[MenuPart] = field(default_factory=list)
    cut: int = 0
    length: int = 0

    def regions(self, state: State, row: int) -> tuple[Region, ...]:
        """The regions of a choice, in order."""
        front = self.fronts[state]
        if self.alone is not None:
            return self.alone.regions(self.length, state, row)
        if front.left[row] == WHOLE:
            return (Region(0, self.length),)
        assert self.left is not None
        number, first = divmod(int(front.left[row]), ROWS)
        part = self.parts[number]
        later = self.rights[part.left].regions(part.right, int(front.right[row]))
        return self.left.regions(part.left, first) + tuple(
            Region(a + self.cut, b + self.cut) for a, b in later
        )


ROWS = 2**32  # more than any front has
"""Numbers of a part and of a row in it are one number."""


@lru_cache(maxsize=4096)
def menu(
    problem: RecomputeProblem, cuts: tuple[int, ...], kept: State, most: int | None, depth: int = 0
) -> Menu:
    """The choices for `tape`, cut into segments at `cuts`; about `most` for each state at its end.

    Bytes are above what was `kept` before, but for what is sent, which counts in every peak.
    """
    length = len(problem.ns)
    if not cuts:
        alone = RegionSearch(problem, 0, length, kept, most)
        return Menu(alone.fronts[length], alone=alone, length=length)
    cut, before, after = _split(cuts, depth)
    left, right = _sub(problem, 0, cut), _sub(problem, cut, length)
    first = menu(left.problem, before, left.local(kept), most, depth + 1)
    joint = Menu({}, left=first, cut=cut, length=length)
    found: dict[State, list[ParetoFront]] = {}
    for state, front in first.fronts.items():
        now = left.absolute(state) | (kept - left.indices)
        later = menu(
            right.problem, tuple(c - cut for c in after), right.local(now), most, depth + 1
        )
        joint.rights[state] = later
        for end, back in later.fronts.items():
            out = (right.absolute(end) | (now - right.indices)) & _across(problem, length)
            both = _put_together(
                front, back, len(joint.parts), _offsets(problem, left, right, kept, now)
            )
            found.setdefault(out, []).append(both)
            joint.parts.append(MenuPart(state, end, out))
    if not problem.fixed:
        out, whole = RegionSearch(problem, 0, length, kept).whole()
        found.setdefault(out, []).append(replace(whole, left=whole.left * 0 + WHOLE))
    joint.fronts.update({out: joined(parts, most) for out, parts in found.items()})
    return joint


def _split(cuts: tuple[int, ...], depth: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where to cut first: the pieces at the ends of a stage are its own, what lies between is shared."""
    index = {0: len(cuts) - 1, 1: 0}.get(depth, len(cuts) // 2)
    return cuts[index], cuts[:index], cuts[index + 1 :]


@dataclass(frozen=True)
class _Sub:
    """A part of a tape by itself; `indices` are those of its storages in the whole one."""

    problem: RecomputeProblem
    order: tuple[int, ...]

    @property
    def indices(self) -> State:
        return frozenset(self.order)

    def local(self, state: State) -> State:
        return frozenset(number for number, index in enumerate(self.order) if index in state)

    def absolute(self, state: State) -> State:
        return frozenset(self.order[number] for number in state)


@lru_cache(maxsize=4096)
def _sub(problem: RecomputeProblem, start: int, stop: int) -> _Sub:
    """The nodes from `start` to `stop`: what enters is made before position 0, what leaves is used at the end."""
    order = [i for i, held in enumerate(problem.held) if _touches(held, start, stop)]
    return _Sub(
        RecomputeProblem(
            ns=problem.ns[start:stop],
            packs=problem.packs[start:stop],
            forward=problem.forward[start:stop],
            flowing=problem.flowing[start:stop],
            before=problem.before[start:stop],
            after=problem.after[start:stop],
            held=tuple(_clipped(problem.held[index], start, stop) for index in order),
            written=problem.written[start:stop],
            boundaries=tuple(
                place - start for place in problem.boundaries if start <= place <= stop
            ),
            fixed=frozenset(place - start for place in problem.fixed if start <= place < stop),
            copies=problem.copies if stop == len(problem.ns) else 0,
        ),
        tuple(order),
    )


def _touches(held: StoredTensor, start: int, stop: int) -> bool:
    if held.sent or start <= held.made < stop:
        return start <= max(0, held.made) < stop
    copied = () if held.copied is None else (held.copied,)
    return held.made < start and any(start <= p < stop for p in (*held.uses, *held.saved, *copied))


def _clipped(held: StoredTensor, start: int, stop: int) -> StoredTensor:
    uses = tuple(place - start for place in held.uses if start <= place < stop)
    return StoredTensor(
        held.bytes,
        max(-1, held.made - start),
        uses + ((stop - start,) if held.last >= stop else ()),
        tuple(place - start for place in held.saved if start <= place < stop),
        held.sent,
        None if held.copied is None else min(held.copied, stop) - start,
    )


def _across(problem: RecomputeProblem, position: int) -> State:
    held = enumerate(problem.held)
    return frozenset(
        index for index, each in held if not each.sent and each.made < position <= each.last
    )


def _offsets(
    problem: RecomputeProblem, left: _Sub, right: _Sub, kept: State, now: State
) -> tuple[int, int]:
    """What lives besides in the left and in the right part: what passes through unkept, and what the other sends."""
    cut, length = len(left.problem.ns), len(problem.ns)
    through = sum(problem.held[i].bytes for i in _across(problem, 0) - left.indices - kept)
    beyond = (_across(problem, cut) & _across(problem, length)) - right.indices - now
    return right.problem.sent + through, left.problem.sent + sum(
        problem.held[i].bytes for i in beyond
    )


def _put_together(
    front: ParetoFront, back: ParetoFront, part: int, offsets: tuple[int, int]
) -> ParetoFront:
    """Every choice of one with every choice of the other."""
    first, second = (
        grid.ravel()
        for grid in np.meshgrid(np.arange(len(front)), np.arange(len(back)), indexing="ij")
    )
    return ParetoFront(
        front.kept[first] + back.kept[second],
        np.maximum(
            front.peak[first] + offsets[0], front.kept[first] + back.peak[second] + offsets[1]
        ),
        front.ns[first] + back.ns[second],
        part * ROWS + first,
        second,
    )
