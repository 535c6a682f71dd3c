"""What a plan's options ask of the partitioner, and the cut that it finds. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from pipecompile.api.recompute import recompute_planner
from pipecompile.api.stages import stages_of
from pipecompile.errors import InfeasibleError, InputError, PipecompileError
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Faster, Options, Stage
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.lower_bounds import buffers, floors, freeable
from pipecompile.memory_model.rank import rank_memory, room
from pipecompile.partition.summation import gradient_sum_order
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import StageSlice
from pipecompile.schedule.named import MAY_SPLIT
from pipecompile.schedule.selection import (
    in_flight_counts,
    named_schedule,
    placements,
    representative_schedule,
    snapshots_of,
)
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import problem_of_stages

if TYPE_CHECKING:
    from pipecompile.partition.problem import (
        MemoryConstraint,
        PartitionProblem,
        Price,
        StageCandidate,
    )
    from pipecompile.partition.result import Partition

__all__ = ["cut", "problem_of", "step_ns", "with_extra"]

OBJECTIVES = ("variance", "max-load", "step-time")
OTHERS_SECONDS = 0.5  # of work on each objective that was not asked for
CAPS_LOWERED = 5


def cut(
    planner: RecomputePlanner, links: Links, assignment: Mapping[str, int] | None = None
) -> Partition:
    """The cut, all objectives' values for it, and whether another objective would shorten the step.

    Its stages compute again what `recomputing` says. With `assignment` the cut is that one, and the best one that is
    found only bounds it.
    """
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    problem, found = _fitting(graph, options, links, placement)
    found = with_extra(planner, problem, assignment or found.assignment, found)
    assert problem.step_ns is not None
    step_ns = problem.step_ns(found.assignment)
    fastest = min(_others(problem, options), key=lambda other: other.step_ns, default=None)
    search = msgspec.structs.replace(
        found.search,
        values={**found.search.values, "step_ns": step_ns},
        faster=fastest if fastest is not None and fastest.step_ns < step_ns else None,
    )
    return replace(found, search=search)


def _others(problem: PartitionProblem, options: Options) -> Iterator[Faster]:
    """What a little work on each other objective finds: the step of its cut."""
    from pipecompile.partition.solver import solve

    assert problem.step_ns is not None
    for objective in OBJECTIVES:
        if objective != options.objective and not (
            objective == "step-time" and options.schedule == "forward-only"
        ):
            with suppress(InfeasibleError):  # which may only mean that little work did not find any
                found = solve(
                    replace(problem, objective=objective), seconds=OTHERS_SECONDS, explained=False
                )
                yield Faster(objective=objective, step_ns=problem.step_ns(found.assignment))


def with_extra(
    planner: RecomputePlanner, problem: PartitionProblem, assignment: Mapping[str, int], found: Partition
) -> Partition:
    """This cut with the time that its stages take to fit their ranks, where loads do not have it."""
    from pipecompile.partition.result import Partition

    extra: dict[int, int] = {}
    if _is_weighed(planner.options) and not _is_in_loads(planner.options):
        stages = stages_of(planner.graph, assignment, planner)
        extra = {index: stage.extra_ns for index, stage in enumerate(stages)}
    return Partition.of(
        problem, assignment, method=found.search.method, bound=found.search.bound, extra_ns=extra
    )


def _fitting(
    graph: CostGraph, options: Options, links: Links, placement: Sequence[int]
) -> tuple[PartitionProblem, Partition]:
    """What is asked of the partitioner, and its cut; InfeasibleError says which constraint cannot be met.

    A searched order may hold fewer microbatches than the named one by which the cut is judged: if that does not fit,
    there must be room for one.
    """
    # Imported here: solvers need numpy and networkx, which reading a plan does not.
    from pipecompile.partition.solver import solve

    for sparing in (False, True) if options.schedule == "search" else (False,):
        problem = problem_of(graph, options, links, placement, sparing=sparing)
        try:
            return problem, _within_caps(graph, options, problem, solve(problem), sparing)
        except InfeasibleError as error:
            refusal = error
    raise InfeasibleError(f"{refusal}{_what_would_fit(graph, options, links)}")


def _within_caps(
    graph: CostGraph, options: Options, problem: PartitionProblem, found: Partition, sparing: bool
) -> Partition:
    """`found`, or another cut where ranks with several stages hold more than the sums that the search goes by.

    Each time the caps are lowered by what is too much; InfeasibleError if that does not help.
    """
    from pipecompile.partition.solver import solve

    if problem.memory is None or problem.memory.price is not None:
        return found
    for _ in range(CAPS_LOWERED):
        excess = _excess(graph, options, problem, found, sparing)
        if not any(excess):
            return found
        caps = tuple(
            max(0, cap - more) for cap, more in zip(problem.memory.caps, excess, strict=True)
        )
        problem = replace(problem, memory=replace(problem.memory, caps=caps))
        try:
            found = solve(problem, seconds=OTHERS_SECONDS, explained=False)
        except InfeasibleError:
            break  # what it would say is about the lowered caps
    rank = max(range(len(excess)), key=excess.__getitem__)
    raise InfeasibleError(
        f"no cut was found whose ranks fit their memory: the last one tried needs {excess[rank]} bytes too many "
        f"on rank {rank}, which holds {options.k // problem.ranks} stages; whether another one fits is not proven"
    )


def _excess(
    graph: CostGraph, options: Options, problem: PartitionProblem, found: Partition, sparing: bool
) -> list[int]:
    """Per rank the bytes over its cap."""
    held: list[dict[int, Stage]] = [{} for _ in range(problem.ranks)]
    planner = recompute_planner(graph, options, problem.stage_ranks)
    for index, stage in enumerate(stages_of(graph, found.assignment, planner)):
        held[problem.stage_ranks[index]][index] = stage
    return [
        _missing(
            graph,
            options,
            problem.stage_ranks,
            {index: stage.footprint for index, stage in stages.items()},
            {index for index, stage in stages.items() if stage.recomputes},
            sparing=sparing,
        )
        for stages in held
    ]


def _missing(
    graph: CostGraph,
    options: Options,
    placement: Sequence[int],
    stages: Mapping[int, Footprint],
    again: Collection[int],
    *,
    sparing: bool,
) -> int:
    """The bytes that these stages, all those of their rank, need over the cap; those `again` recompute as a whole.

    By the order of the named schedule; if `sparing`, by any with room for one microbatch in each stage.
    """
    caps, rank = options.caps(max(placement) + 1), placement[min(stages)]
    assert caps is not None
    allocator = ALLOCATORS[graph.memory]
    if sparing:
        needed = sum((stage.kept + stage.between).bound for stage in stages.values())
        left = room(
            stages,
            caps[rank],
            microbatches=options.microbatches,
            allocator=allocator,
            recomputed=again,
        )
        return max(0, needed - left)
    name = representative_schedule(options, placement)
    but_last = options.recompute == "except-last"
    at = snapshots_of(name, tuple(placement), options.microbatches, bool(again), but_last)[rank]
    memory = rank_memory(stages, at, microbatches=options.microbatches, allocator=allocator)
    return max(0, memory.total.bound - caps[rank])


def problem_of(
    graph: CostGraph,
    options: Options,
    links: Links,
    placement: Sequence[int] | None = None,
    *,
    sparing: bool = False,
) -> PartitionProblem:
    """What the options ask of the partitioner, with the stages placed as given or as the schedule has it.

    `sparing` stages hold one microbatch between forward and backward, others as many as the schedule has it.
    """
    if options.objective == "step-time" and options.schedule == "forward-only":
        raise InputError(
            "step-time weighs a step with backwards, which forward-only has not; choose max-load"
        )
    from pipecompile.partition.problem import PartitionProblem

    placement = tuple(placement or placements(options)[0])
    planner = recompute_planner(graph, options, placement)
    return PartitionProblem(
        graph,
        options.k,
        objective=options.objective,
        links=links,
        placement=None if placement == tuple(range(options.k)) else placement,
        recompute=_share_again(options),
        memory=_memory(planner, sparing),
        pin=options.pin,
        precedence=tuple(gradient_sum_order(graph)),
        granularity=options.granularity,
        parameters_everywhere=options.parameters_everywhere,
        microbatches=options.microbatches,
        whole_backwards=options.schedule not in MAY_SPLIT,
        step_ns=lambda assignment: _step_ns(planner, assignment, links),
    )


def _memory(planner: RecomputePlanner, sparing: bool) -> MemoryConstraint | None:
    """Stages alone on their ranks are priced by the plan's memory model; sums for others are corrected afterwards."""
    graph, options, placement = planner.graph, planner.options, planner.view.placement
    ranks = max(placement) + 1
    caps = options.caps(ranks)
    if caps is None:
        return None
    from pipecompile.partition.problem import BoundaryBuffers, MemoryConstraint

    alone = ranks == options.k
    in_flight = (1,) * options.k if sparing else in_flight_counts(options, placement)
    summed = options.microbatches > max(
        in_flight
    )  # a backward has been when most microbatches are in flight
    may_free, rate = (
        options.recompute == "auto" or bool(options.saving),
        planner.policies.lives.bytes_per_ns,
    )
    return MemoryConstraint(
        caps,
        tuple(in_flight),
        *floors(graph, options.recompute, gradients=summed and not sparing, saving=options.saving),
        price=_price(planner, sparing) if alone else None,
        boundary_buffers=BoundaryBuffers(*buffers(graph, options.microbatches)) if alone else None,
        freeable=freeable(graph, options.recompute, options.saving, rate)
        if alone and may_free
        else (),
    )


def _is_in_loads(options: Options) -> bool:
    """Whether the loads of stages have what they compute again, and prices need not."""
    return options.recompute in ("stage", "except-last")


def _is_weighed(options: Options) -> bool:
    """Whether time hangs on what stages hold: only where they may compute something again or save it otherwise."""
    return options.recompute != "none" or bool(options.saving)


def _share_again(options: Options) -> Fraction:
    """The part of a step's microbatches whose forward the policy has run again, in all stages but the last."""
    spared = {"stage": 0, "except-last": 1}.get(options.recompute, options.microbatches)
    return Fraction(options.microbatches - spared, options.microbatches)


def _price(planner: RecomputePlanner, sparing: bool) -> Callable[[StageCandidate], Price]:
    """What a stage computes again to fit its budget by the plan's memory model, if it can; loads know whole stages."""
    from pipecompile.partition.problem import Price

    graph, options, placement = planner.graph, planner.options, planner.view.placement

    def price(candidate: StageCandidate) -> Price:
        found = planner.of(
            StageSlice(candidate.stage, candidate.before, candidate.nodes), candidate.budget
        )
        within = msgspec.structs.replace(options, memory_bytes=candidate.budget)
        if found is None:
            return Price(None, 0 if options.recompute == "auto" or options.saving else None)
        again = (candidate.stage,) if found.kind in ("stage", "except-last") else ()
        if _missing(
            graph, within, placement, {candidate.stage: found.footprint}, again, sparing=sparing
        ):
            return Price(None, None)
        return Price(0, 0) if _is_in_loads(options) else Price(found.ns, found.least)

    return price


def step_ns(graph: CostGraph, assignment: Mapping[str, int], options: Options, links: Links) -> int:
    """The simulated step of an assignment under the schedule of `options`, or the one that stands in for a search."""
    return _step_ns(recompute_planner(graph, options, placements(options)[0]), assignment, links)


def _step_ns(planner: RecomputePlanner, assignment: Mapping[str, int], links: Links) -> int:
    options, placement = planner.options, planner.view.placement
    stages = stages_of(planner.graph, assignment, planner, weighed=_is_weighed(options))
    problem = problem_of_stages(stages, links, placement, options.microbatches)
    return simulate(problem, named_schedule(representative_schedule(options, placement), problem)).makespan_ns


def _what_would_fit(graph: CostGraph, options: Options, links: Links) -> str:
    """The options nearest to these that can be met, as a sentence; at most a few are tried, and only for memory."""
    if options.memory_bytes is None:
        return ""
    of_ranks = links.ranks is not None or isinstance(
        options.memory_bytes, tuple
    )  # what they list is for no others
    most = options.k if of_ranks else 2 * options.k + 2
    more = [msgspec.structs.replace(options, k=k) for k in range(options.k + 1, most + 1)]
    changed = {f"k={other.k}": other for other in more}
    if options.recompute != "auto":
        changed = {"recompute=auto": msgspec.structs.replace(options, recompute="auto"), **changed}
    fitting = list(
        islice((text for text, other in changed.items() if _is_feasible(graph, other, links)), 2)
    )
    if not fitting:
        return f"; neither up to {most} stages nor recompute would fit: allow more memory or more, smaller microbatches"
    return f"; this would fit: {' or '.join(fitting)}"


def _is_feasible(graph: CostGraph, options: Options, links: Links) -> bool:
    """Whether a little work finds a cut; what does not even fit with what it holds at the least is not priced."""
    from pipecompile.partition.solver import solve

    with suppress(PipecompileError):
        problem = replace(problem_of(graph, options, links), objective="max-load")
        assert problem.memory is not None
        least = replace(problem, memory=replace(problem.memory, price=None, freeable=()))
        for each in (least, problem):
            solve(each, seconds=OTHERS_SECONDS, explained=False)
        return True
    return False
