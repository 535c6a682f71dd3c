"""Regions within regions, for one microbatch in flight.

When a region is computed again, its own forward need not keep all that its backward takes: within it there may be
regions again (Herrmann et al., arXiv 1911.13214, who find the best such choice for chains). A level is a run of nodes
whose forward keeps things: that of the stage, or that of a region that is computed again. It is a sequence of nodes by
themselves and of regions, as in regions.py; what a region takes is a level of its own. So there is one dynamic program
for each place where a region may begin, from the last to the first.

What a region within another reads is taken to live until its backward has ended; torch lets it go as soon as it is
computed again, unless its nodes save it. So peaks may be lower than they are here. Copies of buffers that its nodes
write to are made in the stage's forward, and are taken to live as long as those of the outermost region around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.choice import RegionChoice
from pipecompile.recompute.region import RegionEnds
from pipecompile.recompute.region_search import Region, RegionSearch, State
from pipecompile.recompute.segments import segments

__all__ = ["nested"]

LARGEST = 200  # regions to choose from; in longer stages they lie in one segment, or are whole ones
MOST, INNER = 200, 16  # rows of a state, and of a region

Numbers = NDArray[np.int64]
KEPT, FORWARD, BACKWARD, NS, WRITTEN = COLUMNS = range(5)


def nested(problem: RecomputeProblem, blocks: Sequence[str], available: int) -> RegionChoice | None:
    """The regions of least extra time of one microbatch, in `available` bytes; None if none were found.

    They are listed from outer to inner ones. `blocks` says of each position which block of the model it lies in.
    """
    search = _Search(problem, _allowed(problem, blocks), available)
    return search.cheapest()


def _allowed(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """The regions to choose from."""
    ends = RegionEnds.of(problem)
    if len(ends.regions) <= LARGEST:
        return ends.regions
    cuts = [0, *segments(problem, blocks), len(problem.ns)]
    number = [sum(cut <= place for cut in cuts) for place in range(len(problem.ns) + 1)]
    # Of each segment the first place where a region may begin, and the last where it may stop.
    first = {number[place]: place for place in sorted(ends.begins, reverse=True)}
    last = {number[place - 1]: place for place in sorted(ends.stops)}
    return tuple(
        region
        for region in ends.regions
        for begin, end in [(number[region.start], number[region.stop - 1])]
        if begin == end or (region.start == first[begin] and region.stop == last[end])
    )


class _Step(NamedTuple):
    """From one state to another: the region that is computed again, if any."""

    position: int
    state: State
    region: Region | None


@dataclass(frozen=True)
class _Rows:
    """Choices: their columns, and how each came about: a step, the row before it, the row of the region's own."""

    columns: Numbers
    how: Numbers

    def __len__(self) -> int:
        return len(self.columns)

    def picked(self, rows: Numbers) -> _Rows:
        """Some of them."""
        return _Rows(self.columns[rows], self.how[rows])


@dataclass
class _Search:
    """All levels of a tape."""

    problem: RecomputeProblem
    allowed: tuple[Region, ...]
    available: int

    def __post_init__(self) -> None:
        self.regions = RegionSearch(self.problem, 0, len(self.problem.ns))
        self.inner: dict[Region, tuple[_Level, _Rows]] = {}
        self.stops: dict[int, list[int]] = {}
        for region in self.allowed:
            self.stops.setdefault(region.start, []).append(region.stop)

    def cheapest(self) -> RegionChoice | None:
        """That of the stage."""
        for start in sorted(self.stops, reverse=True):
            _Level(self, start, max(self.stops[start]), is_stage=False).fill()
        level = _Level(self, 0, len(self.problem.ns), is_stage=True)
        level.fill()
        found = [
            (state, row)
            for state, rows in level.fronts[level.stop].items()
            for row in range(len(rows))
        ]
        if not found:
            return None
        rows = level.fronts[level.stop]
        state, row = min(
            found, key=lambda each: tuple(rows[each[0]].columns[each[1], [NS, BACKWARD]])
        )
        kept, forward, backward, ns, _ = rows[state].columns[row].tolist()
        regions = tuple(level.chosen(level.stop, state, row))
        return RegionChoice(regions, ns, kept + level.sent, max(forward, backward))

    def within(self, region: Region, row: int) -> Iterator[Region]:
        """A region and those in it, by the row of its choices."""
        level, rows = self.inner[region]
        step, before, inner = rows.how[row].tolist()
        position, state, last = level.steps[step]
        yield region
        yield from level.chosen(position, state, before)
        if last is not None:
            yield from self.within(last, inner)

    @cached_property
    def before(self) -> list[int]:
        """The time of all nodes before each position."""
        return [0, *accumulate(self.problem.ns)]


@dataclass
class _Level:
    """The forward of the nodes from `start` on that keeps things: for the backward of a stage, or of regions.

    Bytes are above what was there before: of a stage all, of a region what it and regions around it read. `fronts` has
    choices by position, and by which storages are kept across it.
    """

    search: _Search
    start: int
    stop: int
    is_stage: bool
    fronts: dict[int, dict[State, _Rows]] = field(default_factory=dict)
    steps: list[_Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problem = self.search.problem
        first = -1 if self.is_stage else self.start
        own = [
            index for index, held in enumerate(self.problem.held) if first <= held.made < self.stop
        ]
        self.own = frozenset(
            index for index in own if not (self.is_stage and self.problem.held[index].sent)
        )
        self.sent = self.problem.sent if self.is_stage else 0

    def fill(self) -> None:
        """All choices, from left to right."""
        nothing = _Rows(
            np.zeros((1, len(COLUMNS)), dtype=np.int64), np.zeros((1, 3), dtype=np.int64)
        )
        coming: dict[int, dict[State, list[_Rows]]] = {self.start: {frozenset(): [nothing]}}

        def move(position: int, stop: int, region: Region | None) -> None:
            for state, rows in self.fronts[position].items():
                following, moved = self._moved(position, stop, state, rows, region)
                coming.setdefault(stop, {}).setdefault(following, []).append(moved)

        for position in range(self.start, self.stop + 1):
            if not self.is_stage and position in self.search.stops[self.start]:
                self._close(position)
                move(self.start, position, Region(self.start, position))
            parts = coming.pop(position, {})
            self.fronts[position] = {state: self._joined(found) for state, found in parts.items()}
            if position < self.stop:
                move(position, position + 1, None)
            if position > self.start or self.is_stage:
                for stop in self.search.stops.get(position, ()):
                    if stop <= self.stop:
                        move(position, stop, Region(position, stop))

    def chosen(self, position: int, state: State, row: int) -> list[Region]:
        """The regions of a choice at a position, in order."""
        found: list[list[Region]] = []
        while position > self.start:
            step, before, inner = self.fronts[position][state].how[row].tolist()
            position, state, region = self.steps[step]
            row = before
            found += [list(self.search.within(region, inner))] if region else []
        return [region for group in reversed(found) for region in group]

    def _moved(
        self, position: int, stop: int, state: State, rows: _Rows, region: Region | None
    ) -> tuple[State, _Rows]:
        """The choices with one more node, or with each choice for one more region."""
        columns, how, kept = self._after(position, stop, state, rows, region)
        waiting = self._bytes(self._across(position) - state)
        highest = (
            self.problem.forward[position]
            if region is None
            else self.search.regions.again(region).forward
        )
        level = rows.columns[how[:, 1], KEPT] + waiting + self._sent_before(position) + highest
        if self.is_stage and region is not None:
            level += self.search.inner[region][1].columns[how[:, 2], WRITTEN]
        columns[:, FORWARD] = np.maximum(columns[:, FORWARD], level)
        return kept & self._across(stop), _Rows(columns, how)

    def _after(
        self, position: int, stop: int, state: State, rows: _Rows, region: Region | None
    ) -> tuple[Numbers, Numbers, State]:
        """What is kept, and lives in the backward, with one more node or region; its forward aside."""
        now = state | self._needed(position, stop, again=region is not None)
        alone = np.array([[0, 0, self.problem.before[position], 0, 0]])
        inner = alone if region is None else self.search.inner[region][1].columns
        outer_row, inner_row = (each.ravel() for each in np.indices((len(rows), len(inner))))
        columns = rows.columns[outer_row]
        counts = (
            position > self.start or self.is_stage
        )  # what begins a region lets go of what that reads
        done = columns[:, KEPT] + (self.sent + self.problem.after[position] if counts else 0)
        columns[:, KEPT] += self._bytes(now - state)
        columns[:, KEPT if self.is_stage else WRITTEN] += inner[inner_row, WRITTEN]
        columns[:, NS] += inner[inner_row, NS]
        backward = columns[:, KEPT] + self.sent + inner[inner_row, BACKWARD]
        copying = columns[:, KEPT] + (
            self.sent + self._bytes(self._copied - now) if stop == self.stop else 0
        )
        columns[:, BACKWARD] = np.maximum.reduce([columns[:, BACKWARD], backward, done, copying])
        how = np.stack([np.full(len(columns), len(self.steps)), outer_row, inner_row], axis=1)
        self.steps.append(_Step(position, state, region))
        return columns, how, now

    def _close(self, stop: int) -> None:
        """The choices for the region that ends here, as what it takes to compute it again and to go back through it.

        It ends with a node that saves something, or with a region, which then does not run in this forward.
        """
        last = max(
            place for place in range(self.start, stop) if self.problem.packs[place] != "never"
        )
        found = [
            self._ending(last, stop, state, rows, None) for state, rows in self.fronts[last].items()
        ]
        for position in range(self.start + 1, last + 1):
            if stop in self.search.stops.get(position, ()):
                region = Region(position, stop)
                found += [
                    self._ending(position, stop, state, rows, region)
                    for state, rows in self.fronts[position].items()
                ]
        rows = _Rows(
            np.concatenate([each.columns for each in found]),
            np.concatenate([each.how for each in found]),
        )
        flowing = rows.columns[:, FORWARD] + self.problem.flowing[last]
        later = max(
            (max(self.problem.before[p], self.problem.after[p]) for p in range(last + 1, stop)),
            default=0,
        )
        rows.columns[:, BACKWARD] = np.maximum.reduce(
            [rows.columns[:, BACKWARD], flowing, np.full(len(rows), later)]
        )
        rows.columns[:, [KEPT, FORWARD]] = 0
        rows.columns[:, WRITTEN] += sum(self.problem.written[self.start : stop])
        self.search.inner[Region(self.start, stop)] = (
            self,
            _pruned(rows, INNER, self.search.available),
        )

    def _ending(
        self, position: int, stop: int, state: State, rows: _Rows, region: Region | None
    ) -> _Rows:
        """With the last node that saves anything, or a region that it lies in."""
        runs = region is None and self.problem.packs[position] == "after"
        if runs:
            _, moved = self._moved(position, position + 1, state, rows, None)
            columns, how = moved.columns, moved.how
        else:
            columns, how, _ = self._after(
                position, stop if region else position + 1, state, rows, region
            )
        columns[:, NS] += self.search.before[position + runs] - self.search.before[self.start]
        return _Rows(columns, how)

    def _needed(self, start: int, stop: int, *, again: bool) -> State:
        """What the forward must keep for these nodes: what they save, or what a region of them reads."""
        if not again:
            return frozenset(self.search.regions.savings[start]) & self.own
        used = {
            index for position in range(start, stop) for index in self.search.regions.uses[position]
        }
        return frozenset(
            index for index in used & self.own if self.problem.held[index].made < start
        )

    def _across(self, position: int) -> State:
        return self._lives[position - self.start]

    @cached_property
    def _lives(self) -> list[State]:
        """By position what was made before and is needed there or later; what a region sends on, to its end."""
        found: list[set[int]] = [set() for _ in range(self.start, self.stop + 1)]
        for index in self.own:
            held = self.problem.held[index]
            for position in range(held.made + 1, min(self.stop, self._last(held)) + 1):
                found[position - self.start].add(index)
        return list(map(frozenset, found))

    def _last(self, held: StoredTensor) -> int:
        return (
            self.stop if held.sent or (held.copied is not None and not self.is_stage) else held.last
        )

    @cached_property
    def _copied(self) -> State:
        return frozenset(
            index
            for index in self.own
            if self.is_stage and self.problem.held[index].copied is not None
        )

    def _sent_before(self, position: int) -> int:
        held = self.problem.held if self.is_stage else ()
        return sum(each.bytes for each in held if each.sent and each.made < position)

    def _bytes(self, storages: State) -> int:
        return sum(self.problem.held[index].bytes for index in storages)

    def _joined(self, parts: Sequence[_Rows]) -> _Rows:
        if len(parts) == 1 and len(parts[0]) <= MOST:
            return _fitting(parts[0], self.search.available)
        rows = _Rows(
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.how for part in parts]),
        )
        return (
            _least(rows, self.search.available)
            if self.is_stage
            else _pruned(rows, MOST, self.search.available)
        )


def _fitting(rows: _Rows, available: int) -> _Rows:
    """Those that fit by themselves."""
    return rows.picked(
        np.flatnonzero(rows.columns[:, [KEPT, FORWARD, BACKWARD]].max(axis=1) <= available)
    )


def _least(rows: _Rows, available: int) -> _Rows:
    """Of choices that fit, those of which no faster one keeps as little: how much they leave free does not count."""
    rows = _fitting(rows, available)
    rows = rows.picked(
        np.lexsort((rows.columns[:, BACKWARD], rows.columns[:, KEPT], rows.columns[:, NS]))
    )
    least = np.minimum.accumulate(rows.columns[:, KEPT])
    return rows.picked(np.flatnonzero(np.diff(least, prepend=least[:1] + 1)))


def _pruned(rows: _Rows, most: int, available: int) -> _Rows:
    """Without choices that do not fit, or that another is as good as in everything; at most about `most`."""
    rows = _fitting(rows, available)
    if len(rows) > most:
        rows = rows.picked(_spread(rows.columns, most))
    rows = rows.picked(np.lexsort(rows.columns.T))
    values = rows.columns
    better = (values[:, None, :] <= values[None, :, :]).all(axis=2)
    equal = (values[:, None, :] == values[None, :, :]).all(axis=2)
    beaten = better & (~equal | np.triu(np.ones_like(equal), 1))
    return rows.picked(np.flatnonzero(~beaten.any(axis=0)))


def _spread(columns: Numbers, most: int) -> Numbers:
    """The fastest row of each cell of a grid over what is kept and lives in the backward, and those best in one way."""
    cells = max(2, int(most**0.5))
    cell = _cells(columns[:, KEPT], cells) * cells + _cells(columns[:, BACKWARD], cells)
    order = np.lexsort((columns[:, FORWARD], columns[:, NS], cell))
    first = order[np.concatenate([[True], cell[order][1:] != cell[order][:-1]])]
    return np.unique(np.concatenate([first, columns.argmin(axis=0)]))


def _cells(column: Numbers, count: int) -> Numbers:
    low, high = int(column.min()), int(column.max())
    return (column - low) * count // (high - low + 1)
