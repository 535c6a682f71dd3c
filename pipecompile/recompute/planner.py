"""What every stage of a cut recomputes: by a named policy, or what fits at least extra time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from pipecompile.ir.copied_nodes import CutGraph, with_copies
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.memory_model.recompute_problem import RecomputeProblem
from pipecompile.recompute.capped_stage import CappedStage
from pipecompile.recompute.policies import (
    NamedPolicy,
    RecomputePolicies,
    StageRecompute,
    StageSlice,
    stage_slices,
)
from pipecompile.recompute.schedule_view import ScheduleView

__all__ = ["RecomputePlanner"]

# 2^−40 ns for a byte: a tebibyte costs 1 ns, so only time
# decides. 2^20 ns: a byte costs a millisecond.
LOWEST_PRICE, HIGHEST_PRICE = -80, 40
"""Prices of a byte, as p in 2^(p / 2) ns: next to nothing, and more than any recompute costs."""


@dataclass(frozen=True)
class RecomputePlanner:
    """The choice for the stages of one graph under one schedule.

    While cuts are compared, choices must be quick; once the cut is `settled`, a longer search is
    worth it. Where ranks have devices of several kinds, stages are decided by the costs of their
    rank. With `waiting`, stages that do not fit recompute as a whole wherever they then fit:
    that takes longer, but the schedule may run it while the rank waits. Choices are remembered in
    `known`, by stage and memory cap, those of ranks with several stages in `known_ranks`, and
    planners of graphs with copies in `expanded`, by cut.
    """

    graph: CostGraph
    options: Options
    view: ScheduleView
    settled: bool = False
    waiting: bool = False
    known: dict[tuple[StageSlice, int | None], StageRecompute | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    known_ranks: dict[tuple[tuple[StageSlice, ...], int], Mapping[int, StageRecompute]] = field(
        default_factory=dict, repr=False, compare=False
    )
    expanded: dict[tuple[int, ...], CopyPlanner] = field(
        default_factory=dict, repr=False, compare=False
    )

    def with_copies(self, assignment: Mapping[str, int]) -> CopyPlanner:
        """Return the planner for the graph in which each copy is a node of the stage that runs it.

        `assignment` has the stages of all nodes that are not copied.
        """
        if not self.graph.copied:
            return CopyPlanner(self, CutGraph(self.graph, assignment, {}))
        # Where the copies run follows from the cut of the other nodes, which therefore is the key.
        plain = [n.name for n in self.graph.nodes if n.name not in self.graph.copied_set]
        key = tuple(assignment[name] for name in plain)
        if key not in self.expanded:
            cut = with_copies(self.graph, dict(zip(plain, key, strict=True)))
            self.expanded[key] = CopyPlanner(self._forgetful(graph=cut.graph), cut)
        return self.expanded[key]

    @cached_property
    def while_waiting(self) -> RecomputePlanner:
        """The planner for stages that recompute as a whole, while their ranks wait."""
        return self._forgetful(waiting=True, expanded={})

    def on_rank(self, rank: int) -> RecomputePlanner:
        """Return the planner by the costs of a rank's device."""
        if not isinstance(self.graph, UnequalCosts):
            return self
        return self._of_kinds[self.graph.rank_kinds[rank]]

    @cached_property
    def _of_kinds(self) -> Sequence[RecomputePlanner]:
        assert isinstance(self.graph, UnequalCosts)
        return [self._forgetful(graph=kind) for kind in self.graph.kinds]

    def _forgetful(self, **changes: Any) -> RecomputePlanner:
        """Return a planner with changes, which remembers no choice."""
        # `replace` alone would hand on the same dictionaries,
        # with choices for another graph in them.
        return replace(self, known={}, known_ranks={}, **changes)

    def of_all(self, nodes_by_stage: Sequence[tuple[str, ...]]) -> list[StageRecompute | None]:
        """Return what each stage recomputes; None for a stage whose rank nothing lets fit.

        Stages are decided one by one. Where `auto` has a cap to meet and a rank holds several
        stages, these are decided together.
        """
        ranks, placement = self.view.ranks, self.view.placement
        slices, caps = stage_slices(nodes_by_stage), self.options.caps(ranks)
        if self.options.recompute == "auto" and caps is not None and ranks < len(slices):
            chosen: dict[int, StageRecompute] = {}
            for rank, cap in enumerate(caps):
                own = tuple(each for each in slices if placement[each.stage] == rank)
                if (own, cap) not in self.known_ranks:
                    self.known_ranks[own, cap] = self._of_rank(own, cap)
                chosen |= self.known_ranks[own, cap]
            return [chosen[stage_slice.stage] for stage_slice in slices]
        cap_of_rank = (None,) * ranks if caps is None else caps
        return [
            self.of(stage_slice, cap_of_rank[placement[stage_slice.stage]])
            for stage_slice in slices
        ]

    def _of_rank(self, slices: Sequence[StageSlice], cap: int) -> Mapping[int, StageRecompute]:
        """Return the cheapest choice that lets a rank with these stages fit.

        Candidates are each policy for all of them, and regions with one price of a byte in all of
        them. If nothing fits, the one that is nearest to the cap is returned.
        """
        plain = {stage_slice.stage: self.policies.plain(stage_slice) for stage_slice in slices}
        if self.policies.peak_bytes(plain) <= cap:
            return plain
        whole = self._by_policy(slices, "stage")
        if self.waiting and self.policies.peak_bytes(whole) <= cap:
            return whole
        choices = [plain, whole]
        if self._may_spare_last:
            choices.append(self._by_policy(slices, "except-last"))
        if not self.view.may_split:
            choices.append(self._by_policy(slices, "block"))
            choices.append(self._by_policy(slices, "sqrt"))
            choices.append(self._at_one_price(slices, cap))

        def excess_and_time(choice: Mapping[int, StageRecompute]) -> tuple[object, object]:
            excess = max(0, self.policies.peak_bytes(choice) - cap)
            return excess, self.policies.mean_ns(choice)

        return min(choices, key=excess_and_time)

    def _by_policy(
        self, slices: Sequence[StageSlice], policy: NamedPolicy
    ) -> dict[int, StageRecompute]:
        """Return the stages of a rank by one policy; that nothing takes less is not proven."""
        chosen = {}
        for stage_slice in slices:
            recompute = self.policies.by_name(stage_slice, policy)
            chosen[stage_slice.stage] = recompute._replace(least=0)
        return chosen

    def _at_one_price(self, slices: Sequence[StageSlice], cap: int) -> dict[int, StageRecompute]:
        """Return the regions at the lowest price of a byte that lets the rank fit.

        The price is a Lagrange multiplier of the cap: with one price for all stages of the rank,
        no byte is freed in one of them that would be cheaper to free in another.
        """
        problems = [self._problem(stage_slice) for stage_slice in slices]
        low, high = LOWEST_PRICE, HIGHEST_PRICE
        # A higher price frees more bytes for more time, so the first price at which the rank
        # fits is searched by halves. If it does not fit at the highest one, that comes closest.
        while high - low > 1:
            middle = (low + high) // 2
            if self.policies.peak_bytes(self._at_price(slices, problems, middle)) <= cap:
                high = middle
            else:
                low = middle
        return self._at_price(slices, problems, high)

    def _problem(self, stage_slice: StageSlice) -> RecomputeProblem:
        in_flight = self.view.in_flight[stage_slice.stage]
        return self.policies.problem(
            stage_slice, has_gradients=self.options.microbatches > in_flight
        )

    def _at_price(
        self, slices: Sequence[StageSlice], problems: Sequence[RecomputeProblem], exponent: int
    ) -> dict[int, StageRecompute]:
        """Return the regions of least cost where a byte costs 2^(exponent / 2) ns."""
        from pipecompile.recompute.choice import weighed

        chosen: dict[int, StageRecompute] = {}
        for stage_slice, problem in zip(slices, problems, strict=True):
            in_flight = self.view.in_flight[stage_slice.stage]
            blocks = self.policies.blocks(stage_slice)
            choice = weighed(problem, blocks, in_flight, 2 ** (exponent / 2))
            chosen[stage_slice.stage] = self.policies.with_regions(
                stage_slice, choice.regions, choice.ns, 0
            )
        return chosen

    def of(self, stage_slice: StageSlice, cap: int | None) -> StageRecompute | None:
        """Return what a stage recomputes if its rank may hold `cap` bytes.

        None if `auto` or encodings find nothing that fits; a named policy is applied even so.
        """
        own = self.on_rank(self.view.placement[stage_slice.stage])
        if own is not self:
            return own.of(stage_slice, cap)
        if (stage_slice, cap) not in self.known:
            self.known[stage_slice, cap] = self._of(stage_slice, cap)
        return self.known[stage_slice, cap]

    def _of(self, stage_slice: StageSlice, cap: int | None) -> StageRecompute | None:
        policy = self.options.recompute
        if policy != "auto" and not self.options.encodings:
            # Only where it decides is a stage held against its cap.
            return self.policies.by_name(stage_slice, policy)
        plain = self.policies.plain(stage_slice)
        capped = None if cap is None else CappedStage(self.policies, stage_slice, cap, self.settled)
        # One of several stages on a rank cannot be held against its cap by itself.
        if capped is None or capped.fits(plain):
            # `auto` recomputes nothing where the plain stage
            # fits; whoever names a policy gets it anyway.
            return plain if policy == "auto" else self.policies.by_name(stage_slice, policy)
        if policy == "auto":
            recompute = self._cheapest(capped, plain)
        else:
            recompute = self.policies.by_name(stage_slice, policy)
        return capped.or_encoded(recompute, plain) if self.options.encodings else recompute

    def _cheapest(self, capped: CappedStage, plain: StageRecompute) -> StageRecompute | None:
        """Return the cheapest of: the whole stage, all microbatches but the last, regions."""
        # Of the last stage this is `plain`, which does not fit.
        whole = self.policies.by_name(capped.stage_slice, "stage")
        if not self.view.may_split:
            whole = whole._replace(least=0)  # regions may take less
        fitting = [whole] if capped.fits(whole) else []
        if not self.view.may_split and not (fitting and self.waiting):
            regions = capped.regions(plain)
            if regions is not None:
                fitting.insert(0, regions)
        if fitting and self._may_spare_last:
            spared = self.policies.by_name(capped.stage_slice, "except-last")._replace(least=0)
            if capped.fits(spared):
                fitting.append(spared)
        microbatches = self.options.microbatches
        return min(fitting, key=lambda each: each.mean_ns(microbatches), default=None)

    @property
    def _may_spare_last(self) -> bool:
        """Whether the last microbatch may be treated differently from the others.

        Only when the cut is settled: bounds on cuts are for choices that treat all alike.
        """
        return self.settled and self.options.microbatches > 1 and self.options.schedule != "search"

    @cached_property
    def policies(self) -> RecomputePolicies:
        """What stages recompute by named policies, and what their ranks hold then."""
        return RecomputePolicies(self.graph, self.options, self.view)


class CopyPlanner(NamedTuple):
    """A planner for the graph of a cut, and that graph with its cut."""

    planner: RecomputePlanner
    cut: CutGraph
