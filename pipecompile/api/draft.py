"""From a cost graph and options to a plan.

Needs no PyTorch, and returns the same bytes for the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipecompile.api.open_choices import OpenChoices
from pipecompile.api.recompute import recompute_planner
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.forward_graph import forward_graph
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import (
    Fingerprint,
    Options,
    Ordering,
    Plan,
    Prediction,
    Provenance,
    Search,
)
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.serialization import fingerprint
from pipecompile.ir.stage import Stage
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.reading import read_layout
from pipecompile.partition.budget import THOROUGH, CutEffort
from pipecompile.partition.cheap_nodes import with_cheap_nodes_copied
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.stages import owners_of, routes_of, stages_of
from pipecompile.schedule.full_pipeline import full_pipeline_ns
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.selection import named_order_of, placements, schedule_plan
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, memory_by_rank, problem_of_stages

if TYPE_CHECKING:  # the partitioner needs numpy, which reading and checking a plan does not
    from pipecompile.partition.result import Partition

__all__ = [
    "MemoryOfRanks",
    "Origin",
    "Scheduled",
    "assembled",
    "best_plan",
    "costs_digest",
    "draft",
    "node_times",
    "planned_graph",
    "predicted",
    "scheduled",
]


def draft(
    graph: CostGraph,
    options: Options,
    *,
    graph_digest: str,
    capture: Provenance,
    microbatch_shapes: Sequence[tuple[int, ...]],
    links: Links = FREE,
    assignment: Mapping[str, int] | None = None,
    effort: CutEffort = THOROUGH,
) -> Plan:
    """Return the plan for `graph` under `options`; InfeasibleError says which constraint cannot be
    met.

    `microbatch_shapes` are those of the model's input tensors. Links default to free ones, because
    what a transfer costs is not known before it is measured. `assignment` is a feasible cut (node
    to stage) that is to be kept. Of what the options leave open, the placement, the order and what
    is recomputed, the plan with the shortest step is returned; under noise, of plans that are about
    as fast, the one of least regret. `effort` says for how long a cut is searched. InputError if a
    KV cache is asked for, and no attention is known.
    """
    graph = planned_graph(graph, options, links)
    origin = Origin(
        Fingerprint(graph=graph_digest, costs=costs_digest(graph)),
        capture,
        tuple(tuple(shape) for shape in microbatch_shapes),
    )
    try:
        best = _shortest(graph, options, links, origin, assignment, effort)
    except InfeasibleError:
        if not graph.copied:
            raise
        # Copies may take the last bytes of a rank that would only pass their values on.
        plain = msgspec.structs.replace(graph, copied=())
        best = _shortest(plain, options, links, origin, assignment, effort)
    # It was asked for by a layout, and not by the stage of each node.
    return msgspec.structs.replace(best, options=options)


class Origin(NamedTuple):
    """What a plan is made for, and how the model became a graph."""

    fingerprint: Fingerprint
    capture: Provenance
    microbatch_shapes: tuple[tuple[int, ...], ...]


def _shortest(
    graph: CostGraph,
    options: Options,
    links: Links,
    origin: Origin,
    assignment: Mapping[str, int] | None,
    effort: CutEffort,
) -> Plan:
    """Return the plan with the shortest step of those on the placements that are possible."""
    fixed = _fixed_by_layout(graph, options)
    # A placement on which nothing fits is no failure as long as another one has a plan.
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    for placement in placements(options):
        drafter = _PlacementDrafter(graph, placement, links, origin, assignment, effort)
        try:
            plans += _plans_on_placement(drafter, fixed)
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return best_plan(plans, graph, options)


def planned_graph(graph: CostGraph, options: Options, links: Links) -> CostGraph:
    """Return the graph that is planned: `graph`, or for inference its forward alone, with its cheap
    nodes copied.

    InputError if the options speak of a KV cache, and the graph has no attention that is known.
    """
    if isinstance(graph, UnequalCosts):
        # Which nodes are cheap differs from device to device: none is copied.
        return graph.mapped(lambda kind: _needed_graph(kind, options))
    needed = _needed_graph(graph, options)
    # A layout says where nodes lie that nobody has thought of: only what a user pins is held.
    return with_cheap_nodes_copied(needed, options.k, links, options.pin)


def _needed_graph(graph: CostGraph, options: Options) -> CostGraph:
    """Return `graph`, or for inference its forward alone."""
    if not options.is_inference:
        return graph
    speaks_of_cache = options.kv_tokens is not None or options.kv_token_bytes is not None
    if speaks_of_cache and not any(node.kv_token_bytes for node in graph.nodes):
        raise InputError(
            "the KV cache of this model is unknown: no scaled_dot_product_attention over (batch, "
            "heads, tokens, width) was found in it; leave out kv_tokens and kv_token_bytes, and "
            "subtract the cache from memory"
        )
    return forward_graph(graph, options.kv_token_bytes)


def _fixed_by_layout(graph: CostGraph, options: Options) -> Options:
    """Return the options with each node in its stage, if they have a layout."""
    if options.layout is None:
        return options
    layout = read_layout(options.layout, options.layout_format)
    return msgspec.structs.replace(options, pin=assignment_of(layout, graph, options.layers))


def best_plan(plans: Sequence[Plan], graph: CostGraph, options: Options) -> Plan:
    """Return the plan with the shortest step; under the noise of `options` that of least regret.

    All are for one minibatch. The nodes of `graph` share the times of stages in draws of noise.
    """
    if options.noise is None:
        return min(plans, key=lambda plan: plan.prediction.step_ns)
    # Imported here: it needs numpy, which reading and checking a plan does not.
    from pipecompile.schedule.robust_choice import robust_choice

    choice = robust_choice(plans, node_times(graph), options.noise)
    return msgspec.structs.replace(plans[choice.place], robustness=choice.robustness)


def node_times(graph: CostGraph) -> dict[str, int]:
    """Return by name what each node takes for one microbatch, forward and backward, in ns."""
    return {node.name: node.forward_ns + node.backward_ns for node in graph.nodes}


@dataclass(frozen=True)
class _PlacementDrafter:
    """What makes plans on one placement, with a cut that is given or found."""

    graph: CostGraph
    placement: tuple[int, ...]
    links: Links
    origin: Origin
    assignment: Mapping[str, int] | None
    effort: CutEffort

    def planned(self, options: Options, *, explained: bool) -> Plan:
        """Return the plan of the best cut, or of the given one."""
        # Solvers need numpy and networkx, which reading and checking a plan does not.
        from pipecompile.api.partition import cut

        planner = self._planner(options)
        effort = self.effort._replace(is_explained=explained and self.effort.is_explained)
        partition = cut(planner, self.links, self.assignment, effort=effort)
        return _plan_of_cut(planner, self.links, self.origin, partition)

    def with_stages(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with what its stages recompute, and their order, chosen by `options`."""
        result = scheduled(self._planner(options), self.links, plan.assignment)
        return _with_result(plan, options, result)

    def with_order(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with the order of its stages chosen by `options`."""
        result = _ordered(options, plan.stages, self.links, self.placement, plan.allocator)
        return _with_result(plan, options, result)

    def adopted(self, plan: Plan, options: Options, own: Plan | None) -> Plan:
        """Return the plan of any choice as the plan of `options`; `own` is that of their cut."""
        from pipecompile.api.partition import search_of

        search = search_of(plan, self._planner(options), self.links, own.search if own else None)
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
        from pipecompile.api.close_cuts import close_cuts

        planner = self._planner(plan.options)
        for close in close_cuts(planner, self.links, plan):
            # The cut fits by what is known before the order is; the whole may not.
            with suppress(InfeasibleError):
                yield _plan_of_cut(planner, self.links, self.origin, close)

    def _planner(self, options: Options) -> RecomputePlanner:
        is_settled = self.effort.seconds >= THOROUGH.seconds
        return recompute_planner(self.graph, options, self.placement, settled=is_settled)


def _plans_on_placement(drafter: _PlacementDrafter, options: Options) -> Iterator[Plan]:
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
    from pipecompile.api.partition import with_all_time
    from pipecompile.api.partition_problem import problem_of

    result = scheduled(planner, links, partition.assignment)
    if result.recomputes_while_waiting:
        # The cut was scored with regions, which take other times than whole stages.
        problem = problem_of(planner.graph, planner.options, links, planner.view.placement)
        partition = with_all_time(
            _while_waiting(planner), problem, links, partition.assignment, partition.search
        )
    return assembled(planner, links, origin, partition, result)


def _other_orders(plan: Plan) -> Iterator[Plan]:
    """Yield the plan under each named order that its search compared and that fits its ranks."""
    if plan.ordering is None:
        return
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
        stages_per_rank=options.k // result.schedule.ranks,
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


class Scheduled(NamedTuple):
    """The stages of a cut, the order of their actions, and what a step is expected to take and
    hold.

    With `recomputes_while_waiting` whole stages recompute where their ranks would wait.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    ordering: Ordering | None
    prediction: Prediction
    recomputes_while_waiting: bool


MemoryOfRanks = Callable[[Sequence[Stage], Schedule, AllocatorName], tuple[RankMemory, ...]]


def scheduled(
    planner: RecomputePlanner,
    links: Links,
    assignment: Mapping[str, int],
    memory: MemoryOfRanks = memory_by_rank,
) -> Scheduled:
    """Return the stages of a cut with their schedule; `memory` says what ranks hold under it.

    Regions are recomputed as part of a backward, and whole stages in an action of their own, which
    may begin while the rank waits for gradients. So whole stages are tried too where regions were
    chosen, and the shorter step is returned.
    """
    with_regions = _schedule(planner, links, assignment, memory)
    has_regions = any(stage.regions for stage in with_regions.stages)
    if planner.options.recompute == "auto" and has_regions:
        # A whole stage may hold more at its peak than regions do, and then not fit.
        with suppress(InfeasibleError):
            with_stages = _schedule(_while_waiting(planner), links, assignment, memory)
            return min(with_regions, with_stages, key=lambda result: result.prediction.step_ns)
    return with_regions


def _while_waiting(planner: RecomputePlanner) -> RecomputePlanner:
    """Return the planner for stages that recompute as a whole, while their ranks wait."""
    return replace(planner, waiting=True, known={}, expanded={})


def _schedule(
    planner: RecomputePlanner,
    links: Links,
    assignment: Mapping[str, int],
    memory: MemoryOfRanks,
) -> Scheduled:
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    stages = stages_of(graph, assignment, planner)
    result = _ordered(options, stages, links, placement, graph.allocator, memory)
    return result._replace(recomputes_while_waiting=planner.waiting)


def _ordered(
    options: Options,
    stages: tuple[Stage, ...],
    links: Links,
    placement: Sequence[int],
    allocator: AllocatorName,
    memory: MemoryOfRanks = memory_by_rank,
) -> Scheduled:
    """Return these stages in the order that the options ask for."""
    schedule, ordering = schedule_plan(options, stages, links, placement, allocator)
    caps = options.caps(schedule.ranks)
    prediction = predicted(stages, schedule, links, caps, allocator, memory)
    return Scheduled(stages, schedule, ordering, prediction, False)


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


def predicted(
    stages: Sequence[Stage],
    schedule: Schedule,
    links: Links,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
    memory: MemoryOfRanks = memory_by_rank,
) -> Prediction:
    """Return the step of `schedule`, simulated, and what its ranks hold, each under its cap."""
    room = activation_caps(stages, schedule.placement, schedule.microbatches, caps, allocator)
    problem = problem_of_stages(stages, links, schedule.placement, schedule.microbatches, room)
    timeline = simulate(problem, schedule)
    return Prediction(
        step_ns=timeline.makespan_ns,
        span_ns=timeline.span_ns,
        bubble=timeline.bubble,
        # Reductions are not in it, as they run beside compute; messages that occupy a rank are.
        loads_ns=tuple(busy // schedule.microbatches for busy in timeline.busy_ns),
        idle=timeline.idle,
        memory=memory(stages, schedule, allocator),
        minibatch_ns=_minibatch_ns(problem, schedule),
    )


def _minibatch_ns(problem: PlacedProblem, schedule: Schedule) -> int | None:
    """Return what a minibatch takes in a full pipeline; None if the schedule empties it."""
    if schedule.weight_versions == "synchronous":
        return None
    return round(full_pipeline_ns(problem) * schedule.microbatches)


def costs_digest(graph: CostGraph) -> str:
    """Return the SHA-256 of the costs.

    Source lines are left out, since they change without the model changing, and so are notes, which
    are no costs, and the copied nodes, which follow from the costs and the options.
    """
    if isinstance(graph, UnequalCosts):
        return fingerprint([costs_digest(graph.kinds[kind]) for kind in graph.rank_kinds])
    plain = tuple(msgspec.structs.replace(node, source="") for node in graph.nodes)
    costs = msgspec.to_builtins(msgspec.structs.replace(graph, nodes=plain, copied=()))
    del costs["cost_notes"]
    return fingerprint(costs)
