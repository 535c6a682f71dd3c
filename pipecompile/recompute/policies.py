"""What stages compute again by the policies that have names, and what their ranks hold then. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, TypedDict

from pipecompile.ir.encodings import Policy
from pipecompile.ir.footprint import NOTHING, Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Options, Saving
from pipecompile.memory_model.allocator import ALLOCATORS, Allocator
from pipecompile.memory_model.live_ranges import Lives
from pipecompile.memory_model.rank import Spare, rank_memory, spare
from pipecompile.memory_model.recompute_problem import RecomputeProblem, recompute_problem_of
from pipecompile.memory_model.snapshots import Moment
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.schedule_view import ScheduleView

__all__ = [
    "NO_RECOMPUTE",
    "StageRecompute",
    "ByHand",
    "StageSlice",
    "RecomputePolicies",
    "ns_of",
    "stage_slices",
]

ByHand = Literal["none", "stage", "except-last", "block", "sqrt"]


class StageRecompute(NamedTuple):
    """What a stage computes again, all of it or regions, and what it holds then.

    `ns` is the extra time, with that of `saving`: runs of nodes outside of regions whose saved tensors lie in another
    form. It is proven that nothing that fits its rank, and treats all microbatches alike, takes less than `least`.
    """

    kind: Literal["none", "stage", "except-last", "regions"]
    regions: tuple[tuple[str, ...], ...]
    ns: int
    least: int
    footprint: Footprint
    saving: tuple[Saving, ...] = ()

    def mean_ns(self, microbatches: int) -> Fraction:
        """The extra time of a microbatch on average over a step."""
        spared = self.kind == "except-last"
        return Fraction(self.ns * (microbatches - spared), microbatches)

    @property
    def kept_bytes(self) -> int:
        """The bound of what a microbatch keeps until it is computed again, or until its backward."""
        if self.kind in ("stage", "except-last"):
            return self.footprint.outputs.bound + self.footprint.written.bound
        return self.footprint.kept.bound


NO_RECOMPUTE = StageRecompute("none", (), 0, 0, NOTHING)


class StageSlice(NamedTuple):
    """The nodes of a stage by its index, and those of all stages before it."""

    stage: int
    before: tuple[str, ...]
    nodes: tuple[str, ...]


def stage_slices(names: Sequence[tuple[str, ...]]) -> list[StageSlice]:
    """All stages, by their nodes."""
    return [
        StageSlice(index, tuple(chain.from_iterable(names[:index])), nodes)
        for index, nodes in enumerate(names)
    ]


class _Step(TypedDict):
    """What the memory of a rank hangs on besides its stages and its moments."""

    microbatches: int
    allocator: Allocator


@dataclass(frozen=True)
class RecomputePolicies:
    """What stages of one graph, placed on ranks, compute again by a policy, and what their ranks hold then."""

    graph: CostGraph
    options: Options
    view: ScheduleView

    def by_hand(self, piece: StageSlice, policy: ByHand, plain: StageRecompute) -> StageRecompute:
        """By policy: nothing in the last stage, which no schedule recomputes, or if the only microbatch is spared."""
        if piece.stage == self.options.k - 1 or (policy, self.options.microbatches) == (
            "except-last",
            1,
        ):
            return plain
        match policy:
            case "none":
                return plain
            case "stage" | "except-last":
                ns = sum(self.graph.by_name[name].forward_ns for name in piece.nodes)
                return plain._replace(kind=policy, ns=ns, least=ns)
            case "block" | "sqrt":
                return self._in_blocks(piece, policy)

    def plain(self, piece: StageSlice) -> StageRecompute:
        """Nothing is computed again."""
        return self.again(piece, (), 0, 0)

    def _in_blocks(self, piece: StageSlice, policy: Literal["block", "sqrt"]) -> StageRecompute:
        """Regions by hand: each block of the model, or about √n of n blocks together."""
        from pipecompile.recompute.choice import per_block, priced, square_root

        problem, blocks = self.problem(piece, summed=True), self.blocks(piece)
        regions = (per_block if policy == "block" else square_root)(problem, blocks)
        ns = priced(problem, regions).ns
        return self.again(piece, regions, ns, ns)

    def again(
        self,
        piece: StageSlice,
        regions: Iterable[tuple[int, int]],
        ns: int,
        least: int,
        saving: Iterable[Saving] = (),
    ) -> StageRecompute:
        """Regions that take `ns`, and at least `least`, and runs of nodes that save in other forms."""
        named = tuple(piece.nodes[start:stop] for start, stop in regions)
        runs = tuple(sorted(saving, key=lambda run: self.lives.place[run.nodes[0]]))
        footprint = footprint_of(self.lives, piece.before, piece.nodes, named, _forms(runs))
        more = ns_of(runs)
        return StageRecompute(
            "regions" if named else "none", named, ns + more, least + more, footprint, runs
        )

    def problem(
        self, piece: StageSlice, *, summed: bool, saving: Iterable[Saving] = ()
    ) -> RecomputeProblem:
        """The stage for a choice of regions."""
        return recompute_problem_of(
            self.lives, piece.before, piece.nodes, summed=summed, saving=_forms(saving)
        )

    def blocks(self, piece: StageSlice) -> list[str]:
        """The block of the model that each of its nodes lies in."""
        return [block_of(self.graph.by_name[name].module) for name in piece.nodes]

    def mean_ns(self, stages: Mapping[int, StageRecompute]) -> Fraction:
        """The extra time of a microbatch in all of them, on average over a step."""
        return sum(
            (again.mean_ns(self.options.microbatches) for again in stages.values()), Fraction(0)
        )

    def total(self, stages: Mapping[int, StageRecompute]) -> int:
        """What the rank of these stages may hold at its peak, by the named schedule or that which stands in for one."""
        kinds = {again.kind for again in stages.values()}
        at = self._moments(
            next(iter(stages)),
            not kinds.isdisjoint(("stage", "except-last")),
            "except-last" in kinds,
        )
        return rank_memory(
            {index: again.footprint for index, again in stages.items()}, at, **self._step
        ).total.bound

    def spare(self, piece: StageSlice, plain: StageRecompute, cap: int) -> list[Spare]:
        """What a stage that is alone on its rank may take as each of its backwards begins."""
        return list(
            spare(
                {piece.stage: plain.footprint},
                piece.stage,
                cap,
                self._moments(piece.stage),
                **self._step,
            )
        )

    def _moments(
        self, index: int, again: bool = False, but_last: bool = False
    ) -> tuple[Moment, ...]:
        """Of the rank of a stage."""
        return self.view.snapshots(index, again, but_last)

    @property
    def _step(self) -> _Step:
        return {
            "microbatches": self.options.microbatches,
            "allocator": ALLOCATORS[self.graph.memory],
        }

    @cached_property
    def lives(self) -> Lives:
        """The storages of the graph."""
        return Lives(self.graph, self.options.optimizer, self.options.master_weights)


def ns_of(saving: Iterable[Saving]) -> int:
    """The time that it takes to save so."""
    return sum(run.ns for run in saving)


def _forms(saving: Iterable[Saving]) -> list[tuple[tuple[str, ...], tuple[Policy, ...]]]:
    return [(run.nodes, run.policies) for run in saving]
