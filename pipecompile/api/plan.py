"""From a cost graph and options to a plan. Needs no PyTorch, and gives the same bytes for the same
input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pipecompile.api.recompute import recompute_planner
from pipecompile.api.stages import owners_of, routes_of, stages_of
from pipecompile.errors import InfeasibleError
from pipecompile.ir.amount import AllocatorName
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
    Stage,
)
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.serialization import fingerprint
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.schedule.selection import placements, schedule_plan
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, memory_by_rank, problem_of_stages

__all__ = ["Scheduled", "costs_digest", "draft", "predicted", "scheduled"]


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
    """The plan for `graph` under `options`; InfeasibleError says which constraint cannot be met.

    `microbatch_shapes` are those of the model's input tensors. Links default to free ones: what a
    transfer costs is not known before it is measured. `assignment` is a feasible cut that is to be
    kept.
    """
    shapes = [tuple(shape) for shape in microbatch_shapes]
    fingerprint = Fingerprint(graph=graph_digest, costs=costs_digest(graph))
    drafts, refusals = [], []
    for placement in placements(options):
        try:
            drafts.append(
                _drafted(graph, options, links, placement, fingerprint, capture, shapes, assignment)
            )
        except InfeasibleError as error:
            refusals.append(error)
    if not drafts:
        raise refusals[0]
    return min(drafts, key=lambda plan: plan.prediction.step_ns)


def _drafted(
    graph: CostGraph,
    options: Options,
    links: Links,
    placement: Sequence[int],
    fingerprint: Fingerprint,
    capture: Provenance,
    microbatch_shapes: Sequence[tuple[int, ...]],
    assignment: Mapping[str, int] | None,
) -> Plan:
    """The plan with its stages on these ranks."""
    # Imported here: solvers need numpy and networkx, which reading and checking a plan does not.
    from pipecompile.api.partition import cut, with_memory_time
    from pipecompile.api.partition_problem import problem_of

    planner = recompute_planner(graph, options, placement, settled=True)
    partition = cut(planner, links, assignment)
    made = scheduled(planner, links, partition.assignment)
    if made.waiting:
        problem = problem_of(graph, options, links, placement)
        partition = with_memory_time(_waiting(planner), problem, partition.assignment, partition)
    return Plan(
        fingerprint=fingerprint,
        options=options,
        capture=capture,
        k=options.k,
        ranks=made.schedule.ranks,
        stages_per_rank=options.k // made.schedule.ranks,
        replicas=1,
        microbatches=options.microbatches,
        microbatch_shapes=tuple(microbatch_shapes),
        links=links,
        allocator=graph.memory,
        time_unit=graph.time_unit,
        stages=made.stages,
        routes=tuple(routes_of(graph, partition.assignment)),
        parameters=tuple(owners_of(graph, made.stages)),
        schedule=made.schedule,
        prediction=made.prediction,
        search=_told(partition.search, made.prediction.step_ns),
        ordering=made.ordering,
    )


class Scheduled(NamedTuple):
    """The stages of a cut, who does what when, what that is expected to take, and whether
    recomputes fill `waiting`.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    ordering: Ordering | None
    prediction: Prediction
    waiting: bool


def scheduled(planner: RecomputePlanner, links: Links, assignment: Mapping[str, int]) -> Scheduled:
    """The stages of a cut in order; with whole stages computed again, rather than regions, if the
    step is shorter.
    """
    found = _ordered(planner, links, assignment)
    if planner.options.recompute == "auto" and any(stage.regions for stage in found.stages):
        with suppress(InfeasibleError):
            other = _ordered(_waiting(planner), links, assignment)
            return min(found, other, key=lambda each: each.prediction.step_ns)
    return found


def _waiting(planner: RecomputePlanner) -> RecomputePlanner:
    return replace(planner, waiting=True, known={})


def _ordered(planner: RecomputePlanner, links: Links, assignment: Mapping[str, int]) -> Scheduled:
    graph, options = planner.graph, planner.options
    stages = stages_of(graph, assignment, planner)
    schedule, ordering = schedule_plan(options, stages, links, planner.view.placement, graph.memory)
    prediction = predicted(stages, schedule, links, options.caps(schedule.ranks), graph.memory)
    return Scheduled(stages, schedule, ordering, prediction, planner.waiting)


def _told(search: Search, step_ns: int) -> Search:
    """With the step of the plan, whose schedule may be another than the one by which the cuts were
    compared.
    """
    faster = (
        search.faster
        if search.faster is not None and search.faster.step_ns * 100 < step_ns * 99
        else None
    )
    return msgspec.structs.replace(
        search, values={**search.values, "step_ns": step_ns}, faster=faster
    )


def predicted(
    stages: Sequence[Stage],
    schedule: Schedule,
    links: Links,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
) -> Prediction:
    """The step of `schedule` simulated, and what its ranks hold, each under its cap."""
    room = activation_caps(stages, schedule.placement, schedule.microbatches, caps, allocator)
    problem = problem_of_stages(stages, links, schedule.placement, schedule.microbatches, room)
    timeline = simulate(problem, schedule)
    return Prediction(
        step_ns=timeline.makespan_ns,
        span_ns=timeline.span_ns,
        bubble=timeline.bubble,
        loads_ns=tuple(busy // schedule.microbatches for busy in timeline.busy_ns),
        idle=timeline.idle,
        memory=memory_by_rank(stages, schedule, allocator),
    )


def costs_digest(graph: CostGraph) -> str:
    """SHA-256 of the costs; source lines are left out, since they change without the model
    changing.
    """
    plain = tuple(msgspec.structs.replace(node, source="") for node in graph.nodes)
    return fingerprint(msgspec.structs.replace(graph, nodes=plain))
