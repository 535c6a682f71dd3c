"""Every choice of regions that counts, by dynamic programming over the positions of a tape.

A region is a run of nodes computed again before their backwards (gradient checkpointing; Chen et al., arXiv
1604.06174). What the forward must keep hangs on which storages are needed outside of the region that makes them:
so a state is a position with the storages that live across it and are kept already, and from it goes either one node
that is not computed again, or a region of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.pareto_front import Numbers, ParetoFront, joined
from pipecompile.recompute.region import Region, RegionEnds

__all__ = ["Region", "RegionSearch", "State"]

State = frozenset[int]  # indices of storages that are kept already


class RegionCost(NamedTuple):
    """What a region takes: time, the most that lives in its forward and in its backward, and copies that it keeps."""

    ns: int
    forward: int
    backward: int
    written: int = 0


class _Step(NamedTuple):
    """From one state to another: the region that is computed again, if any."""

    position: int
    state: State
    region: Region | None


class _Move(NamedTuple):
    """What a step adds: to which state, bytes kept, the most that lives meanwhile above those before, and time."""

    state: State
    kept: int
    rise: int
    ns: int


@dataclass(frozen=True)
class RegionSearch:
    """The choices for the nodes of `tape` from `start` to `stop`: all that count, or about `most` in each state.

    `fronts` has them by position and by what is kept across it. Bytes are above what was kept before `start`: of that
    `kept` are the storages that are used from there on.
    """

    problem: RecomputeProblem
    start: int
    stop: int
    kept: State = frozenset()
    most: int | None = None
    steps: list[_Step] = field(default_factory=list, init=False, compare=False)
    known: dict[Region, RegionCost] = field(default_factory=dict, init=False, compare=False)
    needs: dict[tuple[int, int, bool], State] = field(
        default_factory=dict, init=False, compare=False
    )

    def regions(self, position: int, state: State, row: int) -> tuple[Region, ...]:
        """The regions of a choice, in order."""
        found: list[Region] = []
        while position > self.start:
            front = self.fronts[position][state]
            position, before, region = self.steps[front.left[row]]
            found += [region] if region else []
            state, row = before, int(front.right[row])
        return tuple(reversed(found))

    @cached_property
    def fronts(self) -> dict[int, dict[State, ParetoFront]]:
        """The choices."""
        found = {self.start: {self.kept & self._across[self.start]: ParetoFront.of(0, 0, 0)}}
        incoming: dict[int, dict[State, list[ParetoFront]]] = {}
        for position in range(self.start, self.stop + 1):
            if position in incoming:
                found[position] = {
                    s: joined(parts, self.most) for s, parts in incoming.pop(position).items()
                }
            for state, front in found.get(position, {}).items():
                rows = np.arange(len(front))
                for stop, region in self._steps(position):
                    move = self._move(position, stop, state, region)
                    left = np.full(len(front), len(self.steps))
                    self.steps.append(_Step(position, state, region))
                    incoming.setdefault(stop, {}).setdefault(move.state, []).append(
                        _moved(front, move, left, rows)
                    )
        return found

    def whole(self) -> tuple[State, ParetoFront]:
        """All nodes as one region."""
        state, kept, peak, ns = self.along((Region(self.start, self.stop),))
        return state, ParetoFront.of(kept, peak, ns)

    def along(self, regions: Sequence[Region]) -> tuple[State, int, int, int]:
        """These regions, which are in order: what is kept across the end, and bytes kept, peak and extra time."""
        position, state = self.start, self.kept & self._across[self.start]
        kept = peak = ns = 0
        begins = {region.start: region for region in regions}
        while position < self.stop:
            region = begins.get(position)
            stop = region.stop if region else position + 1
            move = self._move(position, stop, state, region)
            peak = max(peak, kept + move.rise)
            position, state, kept, ns = stop, move.state, kept + move.kept, ns + move.ns
        return state, kept, peak, ns

    def _steps(self, position: int) -> Iterator[tuple[int, Region | None]]:
        if position < self.stop:
            yield position + 1, None
        if position in self._ends.begins:
            for stop in range(position + 1, self.stop + 1):
                if stop - 1 in self.problem.fixed:
                    return
                if stop in self._ends.stops:
                    yield stop, Region(position, stop)

    def _move(self, position: int, stop: int, state: State, region: Region | None) -> _Move:
        """One more node, or one more region."""
        now = state | self._needed_by(position, stop, again=region is not None)
        again = RegionCost(0, self.problem.forward[position], self.problem.before[position])
        if region is not None:
            again = self.again(region)
        held, sent = self.problem.held, self.problem.sent
        kept = sum(held[index].bytes for index in now - state) + again.written
        waiting = sum(held[index].bytes for index in self._across[position] - state)
        forward = waiting + self._sent_by[position] + again.forward + again.written
        copied = (
            sum(held[index].bytes for index in self._copied - now)
            if stop == len(self.problem.ns)
            else 0
        )
        rise = max(
            forward, kept + sent + max(again.backward, copied), sent + self.problem.after[position]
        )
        return _Move(now & self._across[stop], kept, rise, again.ns)

    def _needed_by(self, start: int, stop: int, *, again: bool) -> State:
        """What the forward must keep for these nodes: what they save, or what a region of them reads."""
        if (start, stop, again) not in self.needs:
            self.needs[start, stop, again] = self._needs(start, stop, again=again)
        return self.needs[start, stop, again]

    def _needs(self, start: int, stop: int, *, again: bool) -> State:
        if not again:
            return frozenset(i for i in self.savings[start] if not self.problem.held[i].sent)
        if all(
            packs == "never" for packs in self.problem.packs[start:stop]
        ):  # it is never computed again
            return frozenset()
        used = {index for position in range(start, stop) for index in self.uses[position]}
        return frozenset(
            i for i in used if self.problem.held[i].made < start and not self.problem.held[i].sent
        )

    def again(self, region: Region) -> RegionCost:
        """A region by itself, above what was kept for it."""
        if region not in self.known:
            self.known[region] = self._alone(region)
        return self.known[region]

    def _alone(self, region: Region) -> RegionCost:
        last, stop = self._until(region)
        first = self._walk(region, region.stop, again=False)
        backward = self._backward(region, last, self._walk(region, stop, again=True))
        written = sum(self.problem.written[region.start : region.stop])
        if last is None:  # nothing holds on to it
            first, written = first + written, 0
        return RegionCost(sum(self.problem.ns[region.start : stop]), first, backward, written)

    def _until(self, region: Region) -> tuple[int | None, int]:
        """The last node that saves anything, and where computing again stops: that may be before its kernels run."""
        packs = self.problem.packs
        last = max((place for place in range(*region) if packs[place] != "never"), default=None)
        return last, region.start if last is None else last + (packs[last] == "after")

    def extra_ns(self, regions: Sequence[Region]) -> int:
        """The time that these regions take."""
        return sum(
            sum(self.problem.ns[region.start : self._until(region)[1]]) for region in regions
        )

    def _walk(self, region: Region, stop: int, *, again: bool) -> int:
        """The most that lives in the forwards up to `stop`, above what lived before; what is saved `again` stays."""
        now = highest = 0
        for position in range(region.start, stop):
            highest = max(highest, now + self.problem.forward[position])
            now += self._made_bytes[position]
            for held in self._ending[position]:
                if held.made >= region.start and not (
                    again and (held.saved or held.copied is not None)
                ):
                    now -= held.bytes
            highest = max(highest, now)
        return highest

    def _backward(self, region: Region, last: int | None, entry: int) -> int:
        """The most that lives from the last node's backward to the first's, the forward once more at `last`."""
        freed = dict.fromkeys(range(*region), 0)
        for position in range(*region):
            for held in self._made[position]:
                first = min(held.saved, default=region.stop)
                if first < region.stop:
                    freed[first] += held.bytes
        now = highest = 0
        for position in reversed(range(*region)):
            if position == last:
                highest = max(highest, self.problem.flowing[position] + entry)
                now = sum(freed.values())
            highest = max(highest, now + self.problem.before[position])
            now -= freed[position]
            if position > region.start:
                highest = max(highest, now + self.problem.after[position])
        return highest

    @cached_property
    def _made_bytes(self) -> list[int]:
        return [sum(held.bytes for held in made) for made in self._made]

    @cached_property
    def _ending(self) -> list[list[StoredTensor]]:
        """By position what is used there for the last time; what is sent lives on."""
        found: list[list[StoredTensor]] = [[] for _ in self.problem.ns]
        for held in self.problem.held:
            if not held.sent and 0 <= held.last < len(found):
                found[held.last].append(held)
        return found

    @cached_property
    def _across(self) -> list[State]:
        """By position what was made before and is used there or later; what is sent is kept anyway."""
        found: list[set[int]] = [set() for _ in range(len(self.problem.ns) + 1)]
        for index, held in enumerate(self.problem.held):
            for position in range(held.made + 1, held.last + 1) if not held.sent else ():
                found[position].add(index)
        return list(map(frozenset, found))

    @cached_property
    def _copied(self) -> State:
        """What copies are made of when the last node is done."""
        last = range(len(self.problem.ns))
        return frozenset(i for i, held in enumerate(self.problem.held) if held.copied in last)

    @cached_property
    def _sent_by(self) -> list[int]:
        """Bytes that are sent and made before each position."""
        sent = [held for held in self.problem.held if held.sent]
        return [
            sum(held.bytes for held in sent if held.made < p)
            for p in range(len(self.problem.ns) + 1)
        ]

    @cached_property
    def _made(self) -> list[list[StoredTensor]]:
        found: list[list[StoredTensor]] = [[] for _ in self.problem.ns]
        for held in self.problem.held:
            if held.made >= 0:
                found[held.made].append(held)
        return found

    @cached_property
    def savings(self) -> list[list[int]]:
        """By position the storages that its node saves."""
        return self._indices(lambda held: set(held.saved))

    @cached_property
    def uses(self) -> list[list[int]]:
        """By position the storages that its node reads or saves."""
        return self._indices(lambda held: {*held.uses, *held.saved})

    def _indices(self, places_of: Callable[[StoredTensor], set[int]]) -> list[list[int]]:
        """By position the storages whose places it is among."""
        found: list[list[int]] = [[] for _ in self.problem.ns]
        for index, held in enumerate(self.problem.held):
            for place in places_of(held):
                if place < len(found):
                    found[place].append(index)
        return found

    @cached_property
    def _ends(self) -> RegionEnds:
        return RegionEnds.of(self.problem)


def _moved(front: ParetoFront, move: _Move, left: Numbers, right: Numbers) -> ParetoFront:
    """The choices of `front` with a step more."""
    return ParetoFront(
        front.kept + move.kept,
        np.maximum(front.peak, front.kept + move.rise),
        front.ns + move.ns,
        left,
        right,
    )
