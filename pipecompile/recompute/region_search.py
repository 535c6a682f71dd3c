"""Every choice of regions that counts, by a dynamic program over the positions of a stage.

A region is a run of nodes that are recomputed before their backwards (gradient checkpointing; Chen
et al., arXiv 1604.06174). Its forward keeps what the region reads; what its nodes save exists only
from the recompute on.

What a choice costs at later positions depends on one thing only: which of the tensors that are live
across a position it already keeps. So a state is (position, kept live tensors), and a step leads
from it either over one node that is not recomputed, or over a region of any length:

    position   0     1     2     3     4
    step       ●──n0─▶●───region 1‥3───▶●──n3─▶●
                                 (reads t0: t0 is kept from here on)

All choices that reach one state differ in three costs only (bytes kept, peak, extra time), of which
the Pareto front is held. The front at the stage's end holds the answer for every memory cap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.pareto_front import Numbers, ParetoFront, merged
from pipecompile.recompute.region import Region, RegionEnds

__all__ = ["RegionCost", "RegionSearch", "State"]

State = frozenset[int]
"""Indices into `RecomputeProblem.tensors` of those that are kept already."""


class RegionCost(NamedTuple):
    """What a region costs by itself, beyond the tensors that it reads.

    `ns` is the extra time, `forward` and `backward` are the most bytes that live while it runs
    forward, and while it is recomputed and runs backward; `buffer_copies` are bytes that it keeps
    in between.
    """

    ns: int
    forward: int
    backward: int
    buffer_copies: int = 0


class _Step(NamedTuple):
    """From where a choice came: position and state before, and the region in between, if any."""

    position: int
    state: State
    region: Region | None


class _StepCost(NamedTuple):
    """What a step adds: the state that it leads to, bytes kept, time, and its peak.

    `rise` is the most that lives during the step, above what choices before it keep.
    """

    state: State
    kept: int
    rise: int
    ns: int


@dataclass(frozen=True)
class RegionSearch:
    """The choices for the nodes of `problem` from `start` to `stop`.

    `kept` are tensors that are kept before `start`; costs are beyond these. Each state holds all
    choices that count, or about `most` of them.
    """

    problem: RecomputeProblem
    start: int
    stop: int
    kept: State = frozenset()
    most: int | None = None
    _steps: list[_Step] = field(default_factory=list, init=False, compare=False)
    _region_costs: dict[Region, RegionCost] = field(default_factory=dict, init=False, compare=False)
    _kept_for: dict[tuple[int, int, bool], State] = field(
        default_factory=dict, init=False, compare=False
    )

    def regions(self, position: int, state: State, row: int) -> tuple[Region, ...]:
        """Return the regions, in order, of a row of the front at `position` and `state`."""
        regions: list[Region] = []
        # From the end back: each row knows its last step and the row before that step.
        while position > self.start:
            front = self.fronts[position][state]
            position, state_before, region = self._steps[front.left[row]]
            if region is not None:
                regions.append(region)
            state, row = state_before, int(front.right[row])
        return tuple(reversed(regions))

    @cached_property
    def fronts(self) -> dict[int, dict[State, ParetoFront]]:
        """The Pareto front of every state, by position."""
        # Three nodes of 10 ns; n1 saves 4 bytes of n0, n2 saves
        # 4 bytes of n1. The front at the end:
        #
        #     regions   none    1‥2     0‥2
        #     kept      8       4       0
        #     ns        0       20      30
        #
        # Region 1‥2 must keep what it reads of n0, and region 0‥2 reads nothing from outside.
        first_state = self.kept & self._live[self.start]
        fronts = {self.start: {first_state: ParetoFront.of(0, 0, 0)}}
        # Fronts that reach a position are collected until all of them are there, then merged once.
        arriving: dict[int, dict[State, list[ParetoFront]]] = {}
        for position in range(self.start, self.stop + 1):
            if position in arriving:
                fronts[position] = {
                    state: merged(parts, self.most)
                    for state, parts in arriving.pop(position).items()
                }
            for state, front in fronts.get(position, {}).items():
                rows = np.arange(len(front))
                for stop, region in self._next_steps(position):
                    cost = self._step_cost(position, stop, state, region)
                    number = np.full(len(front), len(self._steps))
                    self._steps.append(_Step(position, state, region))
                    states = arriving.setdefault(stop, {})
                    states.setdefault(cost.state, []).append(_after(front, cost, number, rows))
        return fronts

    def whole(self) -> tuple[State, ParetoFront]:
        """Return the state and the front of the one choice that all nodes are one region."""
        state, kept, peak, ns = self.along((Region(self.start, self.stop),))
        return state, ParetoFront.of(kept, peak, ns)

    def along(self, regions: Sequence[Region]) -> tuple[State, int, int, int]:
        """Return for these regions, in order: the state at the end, bytes kept, peak, extra ns."""
        position, state = self.start, self.kept & self._live[self.start]
        kept = peak = ns = 0
        # The same steps as in `fronts`, along one path only.
        region_at = {region.start: region for region in regions}
        while position < self.stop:
            region = region_at.get(position)
            stop = region.stop if region else position + 1
            cost = self._step_cost(position, stop, state, region)
            peak = max(peak, kept + cost.rise)
            position, state, kept, ns = stop, cost.state, kept + cost.kept, ns + cost.ns
        return state, kept, peak, ns

    def _next_steps(self, position: int) -> Iterator[tuple[int, Region | None]]:
        """Yield where each step from `position` ends, with its region."""
        if position < self.stop:
            yield position + 1, None
        if position in self._ends.begins:
            for stop in range(position + 1, self.stop + 1):
                # A region that reaches an excluded node can only grow over it, so stop here.
                if stop - 1 in self.problem.excluded:
                    return
                if stop in self._ends.stops:
                    yield stop, Region(position, stop)

    def _step_cost(
        self, position: int, stop: int, state: State, region: Region | None
    ) -> _StepCost:
        """Return what a step over one node, or over `region`, costs in `state`.

        The peak of a step is that of three moments: its forward, its backward, and the moment
        after it, when gradients of the next backward are summed. What is sent to later stages is
        held in all of them.
        """
        problem = self.problem
        if region is None:
            own = RegionCost(0, problem.forward_peak[position], problem.backward_peak[position])
        else:
            own = self.region_cost(region)
        kept_after = state | self._kept_by_step(position, stop, is_region=region is not None)
        kept = self._bytes(kept_after - state) + own.buffer_copies
        # In the forward, live tensors that nobody keeps still wait for their last reader.
        waiting = self._bytes(self._live[position] - state)
        forward = waiting + self._sent_before[position] + own.forward + own.buffer_copies
        # Copies of views are made when the stage's last node is done, of tensors nobody else keeps.
        is_end = stop == len(problem.forward_ns)
        copied = self._bytes(self._copied_at_end - kept_after) if is_end else 0
        backward = kept + problem.sent_bytes + max(own.backward, copied)
        after = problem.sent_bytes + problem.gradients_after[position]
        return _StepCost(kept_after & self._live[stop], kept, max(forward, backward, after), own.ns)

    def _kept_by_step(self, start: int, stop: int, *, is_region: bool) -> State:
        """Return the tensors that a node (or region) needs from its forward to its backward."""
        key = start, stop, is_region
        if key not in self._kept_for:
            self._kept_for[key] = self._tensors_kept_by(start, stop, is_region=is_region)
        return self._kept_for[key]

    def _tensors_kept_by(self, start: int, stop: int, *, is_region: bool) -> State:
        """Return what a plain node saves, or what a region reads; sent tensors are free."""
        tensors = self.problem.tensors
        if not is_region:
            return frozenset(i for i in self.saved_at[start] if not tensors[i].is_sent)
        if all(self.problem.saves_at[p] == "never" for p in range(start, stop)):
            return frozenset()  # such a region is never recomputed
        # What the region's own nodes produce is recomputed with it, and need not be kept.
        used = {index for position in range(start, stop) for index in self.used_at[position]}
        return frozenset(i for i in used if tensors[i].producer < start and not tensors[i].is_sent)

    def region_cost(self, region: Region) -> RegionCost:
        """Return what a region costs by itself, beyond the tensors that it reads."""
        # A region's own cost depends on no state: what it reads
        # is counted by the step that takes it.
        if region not in self._region_costs:
            self._region_costs[region] = self._priced(region)
        return self._region_costs[region]

    def _priced(self, region: Region) -> RegionCost:
        last_saver, stop = self._recomputed_until(region)
        forward = self._forward_peak(region, region.stop, is_recompute=False)
        recompute = self._forward_peak(region, stop, is_recompute=True)
        backward = self._backward_peak(region, last_saver, recompute)
        buffer_copies = sum(self.problem.buffer_copies[region.start : region.stop])
        if last_saver is None:  # no backward will need the copies: they go when the forward ends
            forward, buffer_copies = forward + buffer_copies, 0
        ns = sum(self.problem.forward_ns[region.start : stop])
        return RegionCost(ns, forward, backward, buffer_copies)

    def _recomputed_until(self, region: Region) -> tuple[int | None, int]:
        """Return the last node that saves anything, and the position where the recompute stops.

        PyTorch stops a recompute as soon as the last saved tensor is there: before the kernels of
        the last saver, if it saves only what it is given.
        """
        # Of nodes 0 … 5, node 2 saves after its kernels and node 4 before: nodes 0 … 3 run again.
        savers = [p for p in range(*region) if self.problem.saves_at[p] != "never"]
        if not savers:
            return None, region.start
        return savers[-1], savers[-1] + (self.problem.saves_at[savers[-1]] == "after")

    def extra_ns(self, regions: Sequence[Region]) -> int:
        """Return the time that these regions take in all."""
        times = self.problem.forward_ns
        return sum(
            sum(times[region.start : self._recomputed_until(region)[1]]) for region in regions
        )

    def _forward_peak(self, region: Region, stop: int, *, is_recompute: bool) -> int:
        """Return the most that lives in the forwards up to `stop`, above what lived before.

        In a recompute saved tensors stay for the backward; in the first forward nothing does.
        """
        live = peak = 0
        for position in range(region.start, stop):
            peak = max(peak, live + self.problem.forward_peak[position])
            # A kernel's peak counts what it produces; afterwards the outputs alone are left.
            live += self._produced_bytes[position]
            for tensor in self._last_used_at[position]:
                stays = is_recompute and (tensor.savers or tensor.copied_at is not None)
                if tensor.producer >= region.start and not stays:
                    live -= tensor.bytes
            peak = max(peak, live)
        return peak

    def _backward_peak(self, region: Region, last_saver: int | None, recompute: int) -> int:
        """Return the most that lives from the last node's backward to the first node's.

        The recompute, whose peak is `recompute`, runs when the backward reaches `last_saver`. From
        then on every tensor of the region is there until the backward of its first saver is done.
        """
        problem = self.problem
        # Backwards run from the last node to the first, so a tensor's first saver is done last.
        freed_at = dict.fromkeys(range(*region), 0)
        for position in range(*region):
            for tensor in self._produced_at[position]:
                first_saver = min(tensor.savers, default=region.stop)
                if first_saver < region.stop:
                    freed_at[first_saver] += tensor.bytes
        live = peak = 0
        for position in reversed(range(*region)):
            if position == last_saver:
                peak = max(peak, problem.gradients_before[position] + recompute)
                live = sum(freed_at.values())
            peak = max(peak, live + problem.backward_peak[position])
            live -= freed_at[position]
            if position > region.start:
                peak = max(peak, live + problem.gradients_after[position])
        return peak

    def _bytes(self, tensors: State) -> int:
        return sum(self.problem.tensors[index].bytes for index in tensors)

    @cached_property
    def _produced_at(self) -> list[list[StoredTensor]]:
        """The tensors that the node at each position produces."""
        produced: list[list[StoredTensor]] = [[] for _ in self.problem.forward_ns]
        for tensor in self.problem.tensors:
            if tensor.producer >= 0:
                produced[tensor.producer].append(tensor)
        return produced

    @cached_property
    def _produced_bytes(self) -> list[int]:
        return [sum(tensor.bytes for tensor in tensors) for tensors in self._produced_at]

    @cached_property
    def _last_used_at(self) -> list[list[StoredTensor]]:
        """The tensors that each position is the last to use; sent ones live on."""
        ending: list[list[StoredTensor]] = [[] for _ in self.problem.forward_ns]
        for tensor in self.problem.tensors:
            if not tensor.is_sent and 0 <= tensor.last_use < len(ending):
                ending[tensor.last_use].append(tensor)
        return ending

    @cached_property
    def _live(self) -> list[State]:
        """The tensors that are produced before each position and used there or later.

        Those that are sent are kept by every choice, so no state needs them.
        """
        live: list[set[int]] = [set() for _ in range(len(self.problem.forward_ns) + 1)]
        for index, tensor in enumerate(self.problem.tensors):
            if not tensor.is_sent:
                for position in range(tensor.producer + 1, tensor.last_use + 1):
                    live[position].add(index)
        return list(map(frozenset, live))

    @cached_property
    def _copied_at_end(self) -> State:
        """The tensors of which copies are made, and sent, when the last node is done."""
        positions = range(len(self.problem.forward_ns))
        tensors = enumerate(self.problem.tensors)
        return frozenset(index for index, tensor in tensors if tensor.copied_at in positions)

    @cached_property
    def _sent_before(self) -> list[int]:
        """The bytes that are sent and produced before each position."""
        sent = [tensor for tensor in self.problem.tensors if tensor.is_sent]
        return [
            sum(tensor.bytes for tensor in sent if tensor.producer < position)
            for position in range(len(self.problem.forward_ns) + 1)
        ]

    @cached_property
    def saved_at(self) -> list[list[int]]:
        """The indices of the tensors that the node at each position saves."""
        return self._indices(lambda tensor: set(tensor.savers))

    @cached_property
    def used_at(self) -> list[list[int]]:
        """The indices of the tensors that the node at each position reads or saves."""
        return self._indices(lambda tensor: {*tensor.uses, *tensor.savers})

    def _indices(self, positions_of: Callable[[StoredTensor], set[int]]) -> list[list[int]]:
        indices: list[list[int]] = [[] for _ in self.problem.forward_ns]
        for index, tensor in enumerate(self.problem.tensors):
            for position in positions_of(tensor):
                if position < len(indices):
                    indices[position].append(index)
        return indices

    @cached_property
    def _ends(self) -> RegionEnds:
        return RegionEnds.of(self.problem)


def _after(front: ParetoFront, cost: _StepCost, step: Numbers, rows: Numbers) -> ParetoFront:
    """Return the choices of `front` with one more step; `step` and `rows` tell how they came."""
    # The step's peak comes on top of what the choices before it keep.
    # So of two choices with the same state the one that keeps less
    # and peaks lower is no worse ever after: dominated rows may go.
    return ParetoFront(
        front.kept + cost.kept,
        np.maximum(front.peak, front.kept + cost.rise),
        front.ns + cost.ns,
        step,
        rows,
    )
