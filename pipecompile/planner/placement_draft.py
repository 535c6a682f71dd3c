"""Plans on one placement: of the best cut or of a given one, and of what options leave open.

Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Fingerprint, Options, Plan, Provenance, Search
from pipecompile.partition.budget import QUICK, THOROUGH, CutEffort
from pipecompile.planner.open_choices import OpenChoices
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.scheduled_stages import (
    Scheduled,
    ordered,
    predicted,
    scheduled,
)
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import WHOLE_STAGE
from pipecompile.recompute.stages import owners_of, routes_of
from pipecompile.schedule.selection import named_order_of

if TYPE_CHECKING:  # the partitioner needs numpy, which reading and checking a plan does not
    from pipecompile.partition.result import Partition

__all__ = ["Origin", "PlacementDrafter", "assembled", "plans_on_placement"]


class Origin(NamedTuple):
    """What a plan is made for, and how the model became a graph."""

    fingerprint: Fingerprint
    capture: Provenance
    microbatch_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlacementDrafter:
    """What makes plans on one placement, with a cut that is given or found.

    `planners` of the options so far are kept, since they remember what stages recompute.
    """

    graph: CostGraph
    placement: tuple[int, ...]
    links: Links
    origin: Origin
    assignment: Mapping[str, int] | None
    effort: CutEffort
    planners: list[RecomputePlanner] = field(default_factory=list, repr=False, compare=False)

    @property
    def explains(self) -> bool:
        """Whether a refusal may say what would fit."""
        return self.effort.is_explained

    def planned(self, options: Options, *, explained: bool) -> Plan:
        """Return the plan of the best cut, or of the given one; if nothing fits where cheap nodes
        are copied, of a cut without copies.
        """
        _refuse_whole_stages(self.graph, options)
        effort = self.effort._replace(is_explained=explained and self.explains)
        if self.graph.copied:
            # Copies may take the last bytes of a rank that would only pass their values on.
            with suppress(InfeasibleError):
                return self._planned(options, effort)
        return self._without_copies._planned(options, effort)

    def explained(self, options: Options) -> Plan:
        """Return what a short search finds where longer ones found nothing; InfeasibleError says
        what is in the way.
        """
        effort = QUICK._replace(is_explained=True, is_advised=self.effort.is_advised)
        return self._without_copies._planned(options, effort)

    def with_stages(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with what its stages recompute, and their order, chosen by `options`."""
        planner = self._drafter_of(plan)._planner(options)
        return _with_result(plan, options, scheduled(planner, self.links, plan.assignment))

    def with_order(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with the order of its stages chosen by `options`."""
        result = ordered(options, plan.stages, self.links, self.placement, plan.allocator)
        return _with_result(plan, options, result)

    def adopted(self, plan: Plan, options: Options, own: Plan | None) -> Plan:
        """Return the plan of any choice as the plan of `options`; `own` is that of their cut."""
        from pipecompile.planner.partition import search_of

        drafter = self._drafter_of(plan)
        # A bound on cuts with copies is none on cuts without them.
        known = own.search if own and self._drafter_of(own) is drafter else None
        planner = drafter._planner(options)
        search = search_of(plan, planner, self.links, known, explained=self.explains)
        stages = plan.stages
        if plan.options.recompute != options.recompute:
            # What a policy takes is no bound of what would do.
            stages = tuple(msgspec.structs.replace(s, recompute_bound_ns=0) for s in stages)
        return msgspec.structs.replace(
            plan,
            options=options,
            stages=stages,
            search=_with_step(search, plan.prediction.step_ns),
        )

    def with_close_cuts(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans with other cuts that are about as fast; none if the cut was given."""
        if self.assignment is not None:
            return
        from pipecompile.planner.close_cuts import close_cuts

        planner = self._drafter_of(plan)._planner(plan.options)
        for close in close_cuts(planner, self.links, plan):
            # The cut fits by what is known before the order is; the whole may not.
            with suppress(InfeasibleError):
                yield _plan_of_cut(planner, self.links, self.origin, close)

    @cached_property
    def _without_copies(self) -> PlacementDrafter:
        """The drafter of the same graph in which no node is copied."""
        if not self.graph.copied:
            return self
        return replace(self, graph=msgspec.structs.replace(self.graph, copied=()), planners=[])

    def _drafter_of(self, plan: Plan) -> PlacementDrafter:
        """Return the drafter of the graph that a plan was made for."""
        # Where no stage needs a copy, both graphs have the same plan.
        return self if plan.copied else self._without_copies

    def _planned(self, options: Options, effort: CutEffort) -> Plan:
        # Solvers need numpy and networkx, which reading and checking a plan does not.
        from pipecompile.planner.partition import cut

        planner = self._planner(options)
        partition = cut(planner, self.links, self.assignment, effort=effort)
        return _plan_of_cut(planner, self.links, self.origin, partition)

    def _planner(self, options: Options) -> RecomputePlanner:
        # A planner remembers what stages recompute, so equal options get the same one.
        for known in self.planners:
            if known.options == options:
                return known
        # A settled planner searches long for what a stage
        # recomputes: too long for one of many plans.
        is_settled = self.effort.seconds >= THOROUGH.seconds
        planner = recompute_planner(self.graph, options, self.placement, settled=is_settled)
        self.planners.append(planner)
        return planner


def plans_on_placement(drafter: PlacementDrafter, options: Options) -> Iterator[Plan]:
    """Yield the plan with the shortest step on a placement; under noise others too that may be
    about as fast: other orders and other cuts.
    """
    plan = OpenChoices(drafter.graph, options, drafter.placement, drafter).shortest()
    yield plan
    if options.noise is not None:
        yield from _other_orders(plan)
        yield from drafter.with_close_cuts(plan)


def _plan_of_cut(
    planner: RecomputePlanner, links: Links, origin: Origin, partition: Partition
) -> Plan:
    """Return the plan whose stages lie on the ranks of the planner's placement."""
    from pipecompile.planner.partition import with_all_time
    from pipecompile.planner.partition_problem import problem_of

    result = scheduled(planner, links, partition.assignment)
    if result.recomputes_while_waiting:
        # The cut was scored with regions, which take other times than whole stages.
        problem = problem_of(planner.graph, planner.options, links, planner.view.placement)
        partition = with_all_time(
            planner.while_waiting, problem, links, partition.assignment, partition.search
        )
    return assembled(planner, links, origin, partition, result)


def _other_orders(plan: Plan) -> Iterator[Plan]:
    """Yield the plan under each named order that its search compared and that fits its ranks."""
    if plan.ordering is None:
        return
    # What the search found stays known, though the order of the plan is now a named one.
    ordering = msgspec.structs.replace(plan.ordering, is_in_plan=False)
    for name in ordering.named_ns:
        if name != plan.schedule.name:
            schedule = named_order_of(plan, name)
            prediction = predicted(
                plan.stages,
                schedule,
                plan.links,
                plan.options.caps(plan.ranks),
                plan.allocator,
            )
            yield msgspec.structs.replace(
                plan,
                schedule=schedule,
                prediction=prediction,
                search=_with_step(plan.search, prediction.step_ns),
                ordering=ordering,
            )


def assembled(
    planner: RecomputePlanner,
    links: Links,
    origin: Origin,
    partition: Partition,
    result: Scheduled,
) -> Plan:
    """Return the plan of a cut and of its schedule."""
    graph, options = planner.graph, planner.options
    whole = planner.with_copies(partition.assignment).cut
    return Plan(
        fingerprint=origin.fingerprint,
        options=options,
        capture=origin.capture,
        k=options.k,
        ranks=result.schedule.ranks,
        stages_per_rank=max(1, options.k // result.schedule.ranks),  # stages may have several ranks
        replicas=options.replicas,
        microbatches=options.microbatches,
        microbatch_shapes=origin.microbatch_shapes,
        links=links,
        allocator=graph.allocator,
        time_unit=graph.time_unit,
        cost_notes=graph.cost_notes,
        stages=result.stages,
        routes=tuple(routes_of(whole.graph, whole.assignment)),
        parameters=tuple(owners_of(graph, result.stages)),
        schedule=result.schedule,
        prediction=result.prediction,
        search=_with_step(partition.search, result.prediction.step_ns),
        ordering=result.ordering,
    )


def _with_result(plan: Plan, options: Options, result: Scheduled) -> Plan:
    """Return the plan with other stages of the same cut, or another order of them."""
    return msgspec.structs.replace(
        plan,
        options=options,
        stages=result.stages,
        schedule=result.schedule,
        ordering=result.ordering,
        prediction=result.prediction,
        search=_with_step(plan.search, result.prediction.step_ns),
    )


def _with_step(search: Search, step_ns: int) -> Search:
    """Return `search` with the step of the plan.

    Cuts were compared by a named schedule, which the plan may not have. The cut of another
    objective is only named if its step is more than 1 % shorter than the plan's.
    """
    faster = search.faster
    # Against a step of 1,000 ns one of 989 is named, and one of 990 is not.
    if faster is not None and faster.step_ns * 100 >= step_ns * 99:
        faster = None
    values = {**search.values, "step_ns": step_ns}
    return msgspec.structs.replace(search, values=values, faster=faster)


def _refuse_whole_stages(graph: CostGraph, options: Options) -> None:
    """Raise InfeasibleError if whole stages are to run again, and a node may not run twice."""
    once = next((node for node in graph.nodes if node.runs_once), None)
    if options.recompute in WHOLE_STAGE and once is not None:
        line = f" ({once.source})" if once.source else ""
        raise InfeasibleError(
            f"recompute={options.recompute!r} runs whole stages again, and {once.name}{line} may "
            "not run twice: it writes to a parameter, or computes with what it keeps of other "
            "microbatches",
            "choose auto or none",
        )
