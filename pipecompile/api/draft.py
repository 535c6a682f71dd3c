"""From a cost graph and options to a plan.

Needs no PyTorch, and returns the same bytes for the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.reading import read_layout
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.stages import owners_of, routes_of, stages_of
from pipecompile.schedule.selection import placements, schedule_plan
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, memory_by_rank, problem_of_stages

if TYPE_CHECKING:  # the partitioner needs numpy, which reading and checking a plan does not
    from pipecompile.partition.result import Partition

__all__ = [
    "MemoryOfRanks",
    "Origin",
    "Scheduled",
    "assembled",
    "costs_digest",
    "draft",
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
) -> Plan:
    """Return the plan for `graph` under `options`; InfeasibleError says which constraint cannot be
    met.

    `microbatch_shapes` are those of the model's input tensors. Links default to free ones, because
    what a transfer costs is not known before it is measured. `assignment` is a feasible cut (node
    to stage) that is to be kept. Of what the options leave open, the placement, the order and what
    is recomputed, the plan with the shortest step is returned. InputError if a KV cache is asked
    for, and no attention is known.
    """
    graph = planned_graph(graph, options)
    origin = Origin(
        Fingerprint(graph=graph_digest, costs=costs_digest(graph)),
        capture,
        tuple(tuple(shape) for shape in microbatch_shapes),
    )
    fixed = _fixed_by_layout(graph, options)
    # A placement on which nothing fits is no failure as long as another one has a plan.
    plans, refusals = [], []
    for placement in placements(options):
        drafter = _PlacementDrafter(graph, placement, links, origin, assignment)
        try:
            plans.append(OpenChoices(graph, fixed, placement, drafter).shortest())
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    best = min(plans, key=lambda plan: plan.prediction.step_ns)
    # It was asked for by a layout, and not by the stage of each node.
    return msgspec.structs.replace(best, options=options)


def planned_graph(graph: CostGraph, options: Options) -> CostGraph:
    """Return the graph that is cut: `graph`, or for inference its forward alone.

    InputError if the options speak of a KV cache, and the graph has no attention that is known.
    """
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


class Origin(NamedTuple):
    """What a plan is made for, and how the model became a graph."""

    fingerprint: Fingerprint
    capture: Provenance
    microbatch_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _PlacementDrafter:
    """What makes plans on one placement, with a cut that is given or found."""

    graph: CostGraph
    placement: tuple[int, ...]
    links: Links
    origin: Origin
    assignment: Mapping[str, int] | None

    def planned(self, options: Options, *, explained: bool) -> Plan:
        """Return the plan of the best cut, or of the given one."""
        planner = self._planner(options)
        return _plan_of_cut(planner, self.links, self.origin, self.assignment, explained=explained)

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
        from pipecompile.api.partition_problem import problem_of

        problem = problem_of(self.graph, options, self.links, self.placement)
        search = search_of(plan, options, problem, own.search if own else None)
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

    def _planner(self, options: Options) -> RecomputePlanner:
        return recompute_planner(self.graph, options, self.placement, settled=True)


def _plan_of_cut(
    planner: RecomputePlanner,
    links: Links,
    origin: Origin,
    assignment: Mapping[str, int] | None,
    *,
    explained: bool,
) -> Plan:
    """Return the plan whose stages lie on the ranks of the planner's placement."""
    # Imported here: solvers need numpy and networkx, which reading and checking a plan does not.
    from pipecompile.api.partition import cut, with_memory_time
    from pipecompile.api.partition_problem import problem_of

    graph, options = planner.graph, planner.options
    partition = cut(planner, links, assignment, explained=explained)
    result = scheduled(planner, links, partition.assignment)
    if result.recomputes_while_waiting:
        # The cut was scored with regions, which take other times than whole stages.
        problem = problem_of(graph, options, links, planner.view.placement)
        while_waiting = _while_waiting(planner)
        partition = with_memory_time(while_waiting, problem, partition.assignment, partition)
    return assembled(planner, links, origin, partition, result)


def assembled(
    planner: RecomputePlanner,
    links: Links,
    origin: Origin,
    partition: Partition,
    result: Scheduled,
) -> Plan:
    """Return the plan of a cut and of its schedule."""
    graph, options = planner.graph, planner.options
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
        stages=result.stages,
        routes=tuple(routes_of(graph, partition.assignment)),
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
    return replace(planner, waiting=True, known={})


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
    )


def costs_digest(graph: CostGraph) -> str:
    """Return the SHA-256 of the costs.

    Source lines are left out, since they change without the model changing.
    """
    plain = tuple(msgspec.structs.replace(node, source="") for node in graph.nodes)
    return fingerprint(msgspec.structs.replace(graph, nodes=plain))
