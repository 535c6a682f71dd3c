"""The stages of a cut with the order of their actions, and what a step is expected to take and
hold. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipecompile.errors import InfeasibleError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options, Ordering, Prediction
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.stage import Stage
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.stages import stages_of
from pipecompile.schedule.full_pipeline import full_pipeline_ns
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.selection import schedule_plan
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, memory_by_rank, problem_of_stages

__all__ = ["MemoryOfRanks", "Scheduled", "ordered", "predicted", "scheduled"]


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
            with_stages = _schedule(planner.while_waiting, links, assignment, memory)
            return min(with_regions, with_stages, key=lambda result: result.prediction.step_ns)
    return with_regions


def _schedule(
    planner: RecomputePlanner,
    links: Links,
    assignment: Mapping[str, int],
    memory: MemoryOfRanks,
) -> Scheduled:
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    stages = stages_of(graph, assignment, planner)
    result = ordered(options, stages, links, placement, graph.allocator, memory)
    return result._replace(recomputes_while_waiting=planner.waiting)


def ordered(
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


def predicted(
    stages: Sequence[Stage],
    schedule: Schedule,
    links: Links,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
    memory: MemoryOfRanks = memory_by_rank,
) -> Prediction:
    """Return the step of `schedule`, simulated, and what its ranks hold, each under its cap."""
    # Caps are no constraint any more, but decide which waits the timeline puts down to memory.
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
