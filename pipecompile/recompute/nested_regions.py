"""Regions within regions, for one microbatch in flight.

When a region is recomputed, its own forward need not keep all that its backward takes: within it
there may be regions again (Herrmann et al., arXiv 1911.13214, who find the best such choice for
chains):

    stage            n0 [ n1 n2 [ n3 n4 ] n5 ]      outer region 1‥5, inner region 3‥4
    forward          keeps what n0 saves and what the outer region reads
    backward of n5   recomputes n1 n2 and keeps what they save and what the inner region reads;
                     then recomputes n3 n4, whose saved tensors exist from here on

A level is a run of nodes whose forward keeps things: that of the stage, or that of a region when it
is recomputed. It is a sequence of plain nodes and regions, as in region_search.py, and what a
region costs is a level of its own. So there is one dynamic program for each position where a region
may begin, from the last position to the first: when a level is filled, all regions within it are
known.

The model errs on the safe side: what an inner region reads is taken to live until its backward has
ended, where PyTorch lets it go when the region has been recomputed, unless its nodes save it.
Copies of buffers are made in the stage's forward, and count for the outermost region around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.choice import RegionChoice
from pipecompile.recompute.nested_rows import (
    BACKWARD,
    FORWARD,
    KEPT,
    NS,
    WRITTEN,
    NestedRows,
    concatenated,
    fitting,
    least_kept,
    undominated,
)
from pipecompile.recompute.pareto_front import Numbers
from pipecompile.recompute.region import Region, RegionEnds
from pipecompile.recompute.region_search import RegionSearch, State
from pipecompile.recompute.segments import segment_cuts

__all__ = ["nested_regions"]

LARGEST = 200
"""Regions to choose from; in longer stages they lie in one segment, or consist of whole ones."""

MOST, MOST_OF_REGION = 200, 16
"""Rows that a state of a level holds, and rows of a region's own choices."""


def nested_regions(
    problem: RecomputeProblem, blocks: Sequence[str], available: int
) -> RegionChoice | None:
    """Return the regions of least extra time with which one microbatch fits; None if none do.

    They are listed from outer to inner ones. `blocks` names for each position the block of the
    model that it lies in; `available` is in bytes.
    """
    return _NestedSearch(problem, _candidates(problem, blocks), available).cheapest()


def _candidates(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[Region, ...]:
    """Return the regions to choose from."""
    ends = RegionEnds.of(problem)
    if len(ends.regions) <= LARGEST:
        return ends.regions
    length = len(problem.forward_ns)
    cuts = [0, *segment_cuts(problem, blocks), length]
    segment = [sum(cut <= position for cut in cuts) for position in range(length + 1)]
    # For each segment the first position where a region may begin, and the last where it may stop.
    first_begin = {segment[p]: p for p in sorted(ends.begins, reverse=True)}
    last_stop = {segment[p - 1]: p for p in sorted(ends.stops)}
    candidates = []
    for region in ends.regions:
        first, last = segment[region.start], segment[region.stop - 1]
        is_whole = region == (first_begin[first], last_stop[last])
        if first == last or is_whole:
            candidates.append(region)
    return tuple(candidates)


class _NestedStep(NamedTuple):
    """From where a choice came: position and state before, and the region in between, if any."""

    position: int
    state: State
    region: Region | None


@dataclass
class _NestedSearch:
    """All levels of a problem."""

    problem: RecomputeProblem
    candidates: tuple[Region, ...]
    available: int

    def __post_init__(self) -> None:
        self.flat = RegionSearch(self.problem, 0, len(self.problem.forward_ns))
        # A region's level, and its choices as the level around it sees them.
        self.inner: dict[Region, tuple[_Level, NestedRows]] = {}
        self.stops: dict[int, list[int]] = {}
        for region in self.candidates:
            self.stops.setdefault(region.start, []).append(region.stop)

    def cheapest(self) -> RegionChoice | None:
        """Return the choice for the stage."""
        # From the right: whatever may lie within a region begins later, and is priced before.
        for start in sorted(self.stops, reverse=True):
            _Level(self, start, max(self.stops[start]), is_stage=False).fill()
        level = _Level(self, 0, len(self.problem.forward_ns), is_stage=True)
        level.fill()
        fronts = level.fronts[level.stop]
        choices = [(state, row) for state, rows in fronts.items() for row in range(len(rows))]
        if not choices:
            return None

        def cost(choice: tuple[State, int]) -> tuple[int, ...]:
            state, row = choice
            return tuple(fronts[state].costs[row, [NS, BACKWARD]])

        state, row = min(choices, key=cost)
        kept, forward, backward, ns, _ = fronts[state].costs[row].tolist()
        regions = tuple(level.regions(level.stop, state, row))
        return RegionChoice(regions, ns, kept + level.sent, max(forward, backward))

    def regions_within(self, region: Region, row: int) -> Iterator[Region]:
        """Yield `region` and those inside it, by the row of its own choices."""
        level, rows = self.inner[region]
        step, row_before, inner_row = rows.origin[row].tolist()
        position, state, last = level.steps[step]
        yield region
        yield from level.regions(position, state, row_before)
        if last is not None:
            yield from self.regions_within(last, inner_row)

    @cached_property
    def ns_before(self) -> list[int]:
        """The time of all nodes before each position."""
        return [0, *accumulate(self.problem.forward_ns)]


@dataclass
class _Level:
    """The forward of the nodes from `start` on that keeps things: the stage's, or a recompute.

    Bytes are beyond what was there before: for the stage everything counts, for a region what it
    and the regions around it read does not. `fronts` holds choices by position and by the tensors
    that are kept across it.
    """

    search: _NestedSearch
    start: int
    stop: int
    is_stage: bool
    fronts: dict[int, dict[State, NestedRows]] = field(default_factory=dict)
    steps: list[_NestedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problem = self.search.problem
        first = -1 if self.is_stage else self.start
        self.own = frozenset(
            index
            for index, tensor in enumerate(self.problem.tensors)
            if first <= tensor.producer < self.stop and not (self.is_stage and tensor.is_sent)
        )
        self.sent = self.problem.sent_bytes if self.is_stage else 0

    def fill(self) -> None:
        """Find all choices, from left to right."""
        # One step leads over a plain node, or over a whole region. From position 0 to position 4,
        # with a region 1‥3 inside the level:
        #
        #     0 ──▶ 1 ──▶ 2 ──▶ 3 ──▶ 4
        #           └─── 1‥3 ──▶┘
        #
        # `arriving` collects what comes to a position on all ways, until it is merged into a front.
        arriving: dict[int, dict[State, list[NestedRows]]] = {
            self.start: {frozenset(): [NestedRows.nothing()]}
        }

        def step(position: int, stop: int, region: Region | None) -> None:
            for state, rows in self.fronts[position].items():
                state_after, rows_after = self._stepped(position, stop, state, rows, region)
                arriving.setdefault(stop, {}).setdefault(state_after, []).append(rows_after)

        for position in range(self.start, self.stop + 1):
            if not self.is_stage and position in self.search.stops[self.start]:
                self._close(position)
                # Another region of this level's begin may continue after the one that ends here.
                step(self.start, position, Region(self.start, position))
            parts = arriving.pop(position, {})
            self.fronts[position] = {state: self._merged(rows) for state, rows in parts.items()}
            if position < self.stop:
                step(position, position + 1, None)
            if position > self.start or self.is_stage:
                for stop in self.search.stops.get(position, ()):
                    if stop <= self.stop:
                        step(position, stop, Region(position, stop))

    def regions(self, position: int, state: State, row: int) -> list[Region]:
        """Return the regions, in order, of a choice at a position."""
        groups: list[list[Region]] = []
        while position > self.start:
            step, row_before, inner_row = self.fronts[position][state].origin[row].tolist()
            position, state, region = self.steps[step]
            row = row_before
            if region is not None:
                groups.append(list(self.search.regions_within(region, inner_row)))
        return [region for group in reversed(groups) for region in group]

    def _stepped(
        self, position: int, stop: int, state: State, rows: NestedRows, region: Region | None
    ) -> tuple[State, NestedRows]:
        """Return the choices with one more node, or with each choice for one more region."""
        costs, origin, kept = self._without_forward(position, stop, state, rows, region)
        waiting = self._bytes(self._live_at(position) - state)
        if region is None:
            forward = self.problem.forward_peak[position]
        else:
            forward = self.search.flat.region_cost(region).forward
        peak = rows.costs[origin[:, 1], KEPT] + waiting + self._sent_before(position) + forward
        if self.is_stage and region is not None:
            peak += self.search.inner[region][1].costs[origin[:, 2], WRITTEN]
        costs[:, FORWARD] = np.maximum(costs[:, FORWARD], peak)
        return kept & self._live_at(stop), NestedRows(costs, origin)

    def _without_forward(
        self, position: int, stop: int, state: State, rows: NestedRows, region: Region | None
    ) -> tuple[Numbers, Numbers, State]:
        """Return costs and origins with one more node or region, apart from its forward's peak.

        The third value is the state after it. Every outer row is combined with every inner row.
        """
        kept = state | self._kept_by_step(position, stop, is_region=region is not None)
        plain = np.array([[0, 0, self.problem.backward_peak[position], 0, 0]])
        # A plain node is one "choice" whose only cost is its backward.
        inner = plain if region is None else self.search.inner[region][1].costs
        # For 2 rows and 3 inner ones outer_row is 0 0 0 1 1 1, and inner_row is 0 1 2 0 1 2.
        outer_row, inner_row = (axis.ravel() for axis in np.indices((len(rows), len(inner))))
        costs = rows.costs[outer_row]
        # The peak while this node or region runs backward is `backward`. `peak_after` is that of
        # the moment after it, when what it kept is free. The first node of a region lets go of what
        # the region reads too: nothing is left after it.
        is_counted = position > self.start or self.is_stage
        after = self.sent + self.problem.gradients_after[position] if is_counted else 0
        peak_after = costs[:, KEPT] + after
        costs[:, KEPT] += self._bytes(kept - state)
        costs[:, KEPT if self.is_stage else WRITTEN] += inner[inner_row, WRITTEN]
        costs[:, NS] += inner[inner_row, NS]
        backward = costs[:, KEPT] + self.sent + inner[inner_row, BACKWARD]
        copies = self.sent + self._bytes(self._copied - kept) if stop == self.stop else 0
        peaks = [costs[:, BACKWARD], backward, peak_after, costs[:, KEPT] + copies]
        costs[:, BACKWARD] = np.maximum.reduce(peaks)
        origin = np.stack([np.full(len(costs), len(self.steps)), outer_row, inner_row], axis=1)
        self.steps.append(_NestedStep(position, state, region))
        return costs, origin, kept

    def _close(self, stop: int) -> None:
        """Note the choices for the region that ends here, as the level around it sees them.

        A recompute ends with the last node that saves something, or with an inner region, which
        then does not run in this forward at all.
        """
        savers = (p for p in range(self.start, stop) if self.problem.saves_at[p] != "never")
        last = max(savers)
        choices = [
            self._ended(last, stop, state, rows, None) for state, rows in self.fronts[last].items()
        ]
        # The inner region may end where this one ends: [ n1 n2 [ n3 n4 ]] recomputes n1 and n2
        # first, and then, when their backward comes, n3 and n4.
        for position in range(self.start + 1, last + 1):
            if stop in self.search.stops.get(position, ()):
                region = Region(position, stop)
                for state, rows in self.fronts[position].items():
                    choices.append(self._ended(position, stop, state, rows, region))
        rows = concatenated(choices)
        recompute = rows.costs[:, FORWARD] + self.problem.gradients_before[last]
        after_last = range(last + 1, stop)
        before_recompute = max(
            (
                max(self.problem.backward_peak[p], self.problem.gradients_after[p])
                for p in after_last
            ),
            default=0,
        )
        peaks = [rows.costs[:, BACKWARD], recompute, np.full(len(rows), before_recompute)]
        rows.costs[:, BACKWARD] = np.maximum.reduce(peaks)
        # Seen from outside, what a recompute keeps lives in the region's backward only.
        rows.costs[:, [KEPT, FORWARD]] = 0
        rows.costs[:, WRITTEN] += sum(self.problem.buffer_copies[self.start : stop])
        pruned = undominated(rows, MOST_OF_REGION, self.search.available)
        self.search.inner[Region(self.start, stop)] = self, pruned

    def _ended(
        self, position: int, stop: int, state: State, rows: NestedRows, region: Region | None
    ) -> NestedRows:
        """Return the choices with the last node that saves anything, or the region it lies in."""
        runs = region is None and self.problem.saves_at[position] == "after"
        # A node that saves its output has to run; one that saves only its inputs does not.
        if runs:
            _, stepped = self._stepped(position, position + 1, state, rows, None)
            costs, origin = stepped.costs, stepped.origin
        else:
            end = stop if region else position + 1
            costs, origin, _ = self._without_forward(position, end, state, rows, region)
        ns_before = self.search.ns_before
        costs[:, NS] += ns_before[position + runs] - ns_before[self.start]
        return NestedRows(costs, origin)

    def _kept_by_step(self, start: int, stop: int, *, is_region: bool) -> State:
        """Return what the forward must keep: what a node saves, or what a region reads."""
        if not is_region:
            return frozenset(self.search.flat.saved_at[start]) & self.own
        used = {index for p in range(start, stop) for index in self.search.flat.used_at[p]}
        tensors = self.problem.tensors
        return frozenset(index for index in used & self.own if tensors[index].producer < start)

    def _live_at(self, position: int) -> State:
        return self._live[position - self.start]

    @cached_property
    def _live(self) -> list[State]:
        """The tensors that were produced before each position and are needed there or later."""
        live: list[set[int]] = [set() for _ in range(self.start, self.stop + 1)]
        for index in self.own:
            tensor = self.problem.tensors[index]
            for position in range(tensor.producer + 1, min(self.stop, self._last(tensor)) + 1):
                live[position - self.start].add(index)
        return list(map(frozenset, live))

    def _last(self, tensor: StoredTensor) -> int:
        """Return the last position that needs a tensor; what a region sends on lives to its end."""
        is_copied_later = tensor.copied_at is not None and not self.is_stage
        return self.stop if tensor.is_sent or is_copied_later else tensor.last_use

    @cached_property
    def _copied(self) -> State:
        """The tensors of which copies are made when the stage's last node is done."""
        if not self.is_stage:
            return frozenset()
        tensors = self.problem.tensors
        return frozenset(index for index in self.own if tensors[index].copied_at is not None)

    def _sent_before(self, position: int) -> int:
        if not self.is_stage:
            return 0
        return sum(t.bytes for t in self.problem.tensors if t.is_sent and t.producer < position)

    def _bytes(self, tensors: State) -> int:
        return sum(self.problem.tensors[index].bytes for index in tensors)

    def _merged(self, parts: Sequence[NestedRows]) -> NestedRows:
        # A single part is a front already.
        if len(parts) == 1 and len(parts[0]) <= MOST:
            return fitting(parts[0], self.search.available)
        rows = concatenated(parts)
        if self.is_stage:
            return least_kept(rows, self.search.available)
        return undominated(rows, MOST, self.search.available)
