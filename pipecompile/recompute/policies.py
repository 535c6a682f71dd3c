"""What stages recompute by a policy that has a name, and what their ranks hold then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, TypedDict

from pipecompile.ir.encodings import Encoding
from pipecompile.ir.footprint import EMPTY_FOOTPRINT, Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Options
from pipecompile.ir.stage import EncodedNodes
from pipecompile.memory_model.allocator import ALLOCATORS, Allocator
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.rank import BackwardAllowance, backward_allowances, rank_memory
from pipecompile.memory_model.recompute_problem import RecomputeProblem, recompute_problem_of
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.schedule_view import ScheduleView

__all__ = [
    "NO_RECOMPUTE",
    "WHOLE_STAGE",
    "NamedPolicy",
    "RecomputePolicies",
    "StageRecompute",
    "StageSlice",
    "encoding_ns",
    "stage_slices",
]

NamedPolicy = Literal["none", "stage", "except-last", "block", "sqrt"]
"""Policies that a user names; `auto` chooses among these and regions of its own."""

WHOLE_STAGE = ("stage", "except-last")
"""Kinds of recompute that run the stage's whole forward once more, in an action of its own."""


class StageRecompute(NamedTuple):
    """What one stage recomputes, and what it holds then.

    `kind` is "none", "regions" of its nodes, the whole "stage", or the whole stage for all
    microbatches of a step "except-last". `encoded_runs` are runs of nodes outside the regions whose
    saved tensors are encoded. `ns` is the extra time of a microbatch for all of this. No choice
    that fits the rank, and treats all microbatches alike, takes less than `least` ns.
    """

    kind: Literal["none", "stage", "except-last", "regions"]
    regions: tuple[tuple[str, ...], ...]
    ns: int
    least: int
    footprint: Footprint
    encoded_runs: tuple[EncodedNodes, ...] = ()

    def mean_ns(self, microbatches: int) -> Fraction:
        """Return the extra time of a microbatch on average over a step."""
        spared = self.kind == "except-last"
        return Fraction(self.ns * (microbatches - spared), microbatches)

    @property
    def kept_bytes(self) -> int:
        """The bound of what a microbatch keeps until its recompute, or else until its backward."""
        if self.kind in WHOLE_STAGE:
            return self.footprint.outputs.bound + self.footprint.buffer_copies.bound
        return self.footprint.activations.bound


NO_RECOMPUTE = StageRecompute("none", (), 0, 0, EMPTY_FOOTPRINT)


class StageSlice(NamedTuple):
    """The nodes of a stage, with the stage's index and the nodes of all stages before it."""

    stage: int
    before: tuple[str, ...]
    nodes: tuple[str, ...]


def stage_slices(nodes_by_stage: Sequence[tuple[str, ...]]) -> list[StageSlice]:
    """Return the slices of all stages."""
    slices = []
    for index, nodes in enumerate(nodes_by_stage):
        before = tuple(chain.from_iterable(nodes_by_stage[:index]))
        slices.append(StageSlice(index, before, nodes))
    return slices


class _StepOptions(TypedDict):
    """What a rank's memory depends on besides its stages and its snapshots."""

    microbatches: int
    allocator: Allocator


@dataclass(frozen=True)
class RecomputePolicies:
    """The policies for the stages of one graph under one schedule."""

    graph: CostGraph
    options: Options
    view: ScheduleView

    def by_name(self, stage_slice: StageSlice, policy: NamedPolicy) -> StageRecompute:
        """Return what a stage recomputes by a named policy.

        The last stage recomputes nothing: its backward follows its forward at once, so no schedule
        has a recompute action there. Nor does "except-last" with a single microbatch, or a whole
        stage with a node that may not run twice.
        """
        is_last_stage = stage_slice.stage == self.options.k - 1
        spares_all = policy == "except-last" and self.options.microbatches == 1
        runs_once = policy in WHOLE_STAGE and any(
            self.graph.by_name[name].runs_once for name in stage_slice.nodes
        )
        if is_last_stage or spares_all or runs_once:
            return self.plain(stage_slice)
        match policy:
            case "none":
                return self.plain(stage_slice)
            case "stage" | "except-last":
                # The footprint stays that of the plain stage: its parts are the same, and how
                # long each of them is held is said by the snapshots, which have an action R then.
                ns = sum(self.graph.by_name[name].forward_ns for name in stage_slice.nodes)
                return self.plain(stage_slice)._replace(kind=policy, ns=ns, least=ns)
            case "block" | "sqrt":
                return self._by_blocks(stage_slice, policy)

    def plain(self, stage_slice: StageSlice) -> StageRecompute:
        """Return the stage without any recompute."""
        return self.with_regions(stage_slice, (), 0, 0)

    def _by_blocks(
        self, stage_slice: StageSlice, policy: Literal["block", "sqrt"]
    ) -> StageRecompute:
        """Return regions of one block of the model each, or of about √n of n blocks together."""
        from pipecompile.recompute.choice import extra_ns, per_block, square_root

        # Whether there are gradients changes bytes only, and only times are asked for here.
        problem, blocks = self.problem(stage_slice, has_gradients=True), self.blocks(stage_slice)
        regions = (per_block if policy == "block" else square_root)(problem, blocks)
        ns = extra_ns(problem, regions)
        # A named policy is no choice among several: what it takes is also the least.
        return self.with_regions(stage_slice, regions, ns, ns)

    def with_regions(
        self,
        stage_slice: StageSlice,
        regions: Iterable[tuple[int, int]],
        ns: int,
        least: int,
        encoded_runs: Iterable[EncodedNodes] = (),
    ) -> StageRecompute:
        """Return the stage with `regions` (positions) that take `ns`, and with encoded runs."""
        named = tuple(stage_slice.nodes[start:stop] for start, stop in regions)
        runs = tuple(sorted(encoded_runs, key=lambda run: self.ranges.place[run.nodes[0]]))
        footprint = footprint_of(
            self._ranges_of(stage_slice.stage),
            stage_slice.before,
            stage_slice.nodes,
            named,
            _encodings_by_nodes(runs),
            self.view.copies(stage_slice.stage),
        )
        encoding = encoding_ns(runs)
        kind: Literal["regions", "none"] = "regions" if named else "none"
        return StageRecompute(kind, named, ns + encoding, least + encoding, footprint, runs)

    def problem(
        self,
        stage_slice: StageSlice,
        *,
        has_gradients: bool,
        encoded_runs: Iterable[EncodedNodes] = (),
    ) -> RecomputeProblem:
        """Return the stage as a problem of choosing regions.

        `has_gradients` says that gradients of parameters are there already when a backward begins.
        """
        named_runs = _encodings_by_nodes(encoded_runs)
        return recompute_problem_of(
            self.ranges,
            stage_slice.before,
            stage_slice.nodes,
            has_gradients=has_gradients and not self.ranges.divides_gradients,
            encoded_runs=named_runs,
        )

    def blocks(self, stage_slice: StageSlice) -> list[str]:
        """Return for each node of the stage the block of the model that it lies in."""
        return [block_of(self.graph.by_name[name].module) for name in stage_slice.nodes]

    def mean_ns(self, stages: Mapping[int, StageRecompute]) -> Fraction:
        """Return the extra time of a microbatch in all `stages`, on average over a step."""
        microbatches = self.options.microbatches
        times = (recompute.mean_ns(microbatches) for recompute in stages.values())
        return sum(times, Fraction(0))

    def peak_bytes(self, stages: Mapping[int, StageRecompute]) -> int:
        """Return the bound of the peak of the rank that has exactly these stages, by index."""
        # Whole-stage recompute has actions of its own, and so other snapshots.
        kinds = {recompute.kind for recompute in stages.values()}
        is_whole = not kinds.isdisjoint(WHOLE_STAGE)
        snapshots = self.view.snapshots(next(iter(stages)), is_whole, "except-last" in kinds)
        footprints = {index: recompute.footprint for index, recompute in stages.items()}
        return rank_memory(footprints, snapshots, **self._step_options).total.bound

    def backward_allowances(
        self, stage_slice: StageSlice, plain: StageRecompute, cap: int
    ) -> list[BackwardAllowance]:
        """Return what a stage alone on its rank may take as each of its backwards begins."""
        snapshots = self.view.snapshots(stage_slice.stage, False, False)
        footprints = {stage_slice.stage: plain.footprint}
        return list(
            backward_allowances(footprints, stage_slice.stage, cap, snapshots, **self._step_options)
        )

    @property
    def _step_options(self) -> _StepOptions:
        allocator = ALLOCATORS[self.graph.allocator]
        return {"microbatches": self.view.held_microbatches, "allocator": allocator}

    @cached_property
    def ranges(self) -> LiveRanges:
        """The live ranges of the graph's storages."""
        return LiveRanges.of(self.graph, self.options)

    def _ranges_of(self, stage: int) -> LiveRanges:
        """Return the live ranges for a stage, which may have replicas of its own."""
        if stage not in self._by_stage:
            self._by_stage[stage] = self.ranges.of_stage(stage, self.view.placement)
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> dict[int, LiveRanges]:
        """The live ranges for stages that were asked for."""
        return {}


def encoding_ns(encoded_runs: Iterable[EncodedNodes]) -> int:
    """Return the extra time of encoded runs, in forward and backward."""
    return sum(run.ns for run in encoded_runs)


def _encodings_by_nodes(
    encoded_runs: Iterable[EncodedNodes],
) -> list[tuple[tuple[str, ...], tuple[Encoding, ...]]]:
    return [(run.nodes, run.encodings) for run in encoded_runs]
