"""The cut of a plan: composes the partitioner with recompute, the memory model and the schedule.

`planner.draft` imports it when it drafts a plan, and not before: solvers need numpy and networkx,
which reading a plan does not. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from pipecompile.errors import InfeasibleError
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Faster, Options, Plan, Search
from pipecompile.ir.stage import Stage
from pipecompile.partition.alternatives import fastest_alternative
from pipecompile.partition.budget import THOROUGH, CutEffort
from pipecompile.partition.cap_correction import corrected_cut
from pipecompile.partition.objective import lower_bound, stage_loads
from pipecompile.partition.problem import OBJECTIVES, PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from pipecompile.planner.partition_problem import (
    has_recompute_in_compute,
    may_pay_for_memory,
    planned_step_ns,
    problem_of,
    rank_missing_bytes,
)
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.what_would_fit import what_would_fit
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.stages import stages_of

__all__ = [
    "SHORT_SECONDS",
    "best_cut",
    "cut",
    "other_objectives",
    "search_of",
    "with_all_time",
]

SHORT_SECONDS = 0.5  # of work on each other objective


def cut(
    planner: RecomputePlanner,
    links: Links,
    assignment: Mapping[str, int] | None = None,
    *,
    effort: CutEffort = THOROUGH,
) -> Partition:
    """Return the cut of a plan, its values by all objectives, and a faster objective if any.

    Its stages recompute what `planner` chooses. With `assignment` the cut is that one, and the best
    cut that is found only bounds it. Raise InfeasibleError if a constraint cannot be met; it says
    which one, and what would fit, if `effort` is explained. What is not has no faster objective.
    """
    options, placement = planner.options, planner.view.placement
    # A given cut needs no search, and a bound only where somebody reads it.
    if assignment is not None and not effort.is_explained:
        problem = problem_of(planner.graph, options, links, placement)
        best = Partition.of(problem, assignment, method="given", bound=0)
    else:
        problem, best = best_cut(planner.graph, options, links, placement, effort=effort)
    # `planner` is settled: it searches longer than the planner by which cuts were compared.
    chosen = assignment or best.assignment
    partition = with_all_time(planner, problem, links, chosen, best.search)
    whole, _ = with_its_copies(planner, problem, links, partition.assignment)
    assert whole.step_ns is not None
    step_ns = whole.step_ns(partition.assignment)
    search = msgspec.structs.replace(
        partition.search,
        values={**partition.search.values, "step_ns": step_ns},
        faster=_faster_objective(planner, problem, links, step_ns) if effort.is_explained else None,
    )
    if options.is_inference:
        search = _for_inference(search, options.objective, problem, whole, partition.assignment)
    return replace(partition, search=search)


def _faster_objective(
    planner: RecomputePlanner, problem: PartitionProblem, links: Links, step_ns: int
) -> Faster | None:
    """Return an objective whose cut has a shorter step, if there is one."""

    def step_of(assignment: Mapping[str, int]) -> int:
        whole, cut = with_its_copies(planner, problem, links, assignment)
        assert whole.step_ns is not None
        return whole.step_ns(cut)

    # A hint for the user only, so it gets little work.
    objectives = other_objectives(planner.options)
    fastest = fastest_alternative(problem, objectives, step_of, seconds=SHORT_SECONDS)
    return fastest if fastest is not None and fastest.step_ns < step_ns else None


def search_of(
    plan: Plan, planner: RecomputePlanner, links: Links, own: Search | None, *, explained: bool
) -> Search:
    """Return how good the cut of a plan is by the problem of the planner's options, and if it is
    `explained` a faster objective.

    The cut may be that of other options, whose bound does not hold. `own` is the search for a cut
    by these, if there is a cut.
    """
    options, step_ns = planner.options, plan.prediction.step_ns
    problem = problem_of(planner.graph, options, links, planner.view.placement)
    faster = _faster_objective(planner, problem, links, step_ns) if explained else None
    if own is plan.search:
        return msgspec.structs.replace(own, faster=faster)
    whole, cut = with_its_copies(planner, problem, links, plan.assignment)
    simulated = replace(whole, step_ns=lambda _: step_ns)
    found = scored(options, simulated, cut, plan.stages, plan.search.method, 0).search
    bound = min(found.value, max(lower_bound(problem), own.bound if own else 0))
    return msgspec.structs.replace(
        found,
        bound=bound,
        gap=(found.value - bound) / found.value if found.value else 0.0,
        proven=found.value == bound,
        values={**found.values, "step_ns": step_ns},
        faster=faster,
    )


def _for_inference(
    search: Search,
    objective: str,
    problem: PartitionProblem,
    whole: PartitionProblem,
    assignment: Mapping[str, int],
) -> Search:
    """Return a search under the objective that was asked for, with the latency of its cut.

    `whole` is the problem with the copies of the cut, which the bound knows nothing of.

    Both sides of a boundary pay for its transfers, and a microbatch waits for them once. So the
    latency is half of Σ load and all compute: with stages of 5 and 6 ns and a transfer of 2 ns in
    between, loads are 7 and 8 ns, and the latency is (15 + 11) / 2 = 13 ns.
    """
    compute = sum(
        whole.kind_compute_ns([name], whole.kind(stage), last=True)
        for name, stage in assignment.items()
    )
    loads = stage_loads(replace(whole, communication="relay"), assignment)
    latency = (sum(loads) + compute) // 2
    search = msgspec.structs.replace(
        search, objective=objective, values={**search.values, "latency_ns": latency}
    )
    if objective != "latency":
        return search
    least = sum(node.forward_ns for node in problem.graph.nodes)
    bound = -(-(search.bound + least) // 2)
    return msgspec.structs.replace(
        search,
        value=latency,
        bound=bound,
        gap=(latency - bound) / latency if latency else 0.0,
        proven=latency == bound,
    )


def best_cut(
    graph: CostGraph,
    options: Options,
    links: Links,
    placement: Sequence[int],
    *,
    effort: CutEffort = THOROUGH,
) -> tuple[PartitionProblem, Partition]:
    """Return the problem of the options and its cut.

    Raise InfeasibleError if there is no cut. It says why, and what would fit, if that is to be
    explained, which may take longer than the search.

    A searched schedule may hold fewer microbatches than the named one that represents it. If
    nothing fits by that, a cut will do that has room for one microbatch in each stage.
    """
    planner = recompute_planner(graph, options, placement)
    # A refusal with copies is not the last word: without them there may be a cut.
    is_explained = effort.is_explained and not graph.copied
    # The named order that represents the search holds as many as it needs to be fast; the
    # search itself may choose one that holds less, down to a microbatch in each stage.
    for one_in_flight in (False, True) if options.schedule == "search" else (False,):
        problem = problem_of(graph, options, links, placement, one_in_flight=one_in_flight)
        # Too few units for k are refused here: more stages or recompute would be no advice.
        _ = problem.units
        is_priced = problem.memory is not None and problem.memory.price is not None
        missing_by_rank = partial(_missing_by_rank, planner, one_in_flight)
        try:
            best = solve(problem, seconds=effort.seconds, explained=is_explained)
            if is_priced and not graph.copied:
                return problem, best
            return problem, corrected_cut(problem, best, missing_by_rank)
        except InfeasibleError as error:
            refusal = error
    if not is_explained or not effort.is_advised:
        raise refusal
    raise InfeasibleError(str(refusal), what_would_fit(graph, options, links))


def _missing_by_rank(
    planner: RecomputePlanner, one_in_flight: bool, partition: Partition
) -> list[int]:
    """Return, for each rank, the bytes that a cut needs over its cap; below 0 what is left."""
    # Of the replicas of a stage, which hold alike, the first one stands for all.
    placement, ranks = planner.view.placement, sorted(set(planner.view.placement))
    footprints: list[dict[int, Footprint]] = [{} for _ in range(max(ranks) + 1)]
    recomputed: list[set[int]] = [set() for _ in footprints]
    for index, stage in enumerate(stages_of(planner.graph, partition.assignment, planner)):
        footprints[placement[index]][index] = stage.footprint
        if stage.recomputes:
            recomputed[placement[index]].add(index)
    return [
        rank_missing_bytes(
            planner.graph,
            planner.options,
            placement,
            footprints[rank],
            recomputed[rank],
            one_in_flight=one_in_flight,
        )
        for rank in ranks
    ]


def with_all_time(
    planner: RecomputePlanner,
    problem: PartitionProblem,
    links: Links,
    assignment: Mapping[str, int],
    search: Search,
) -> Partition:
    """Return this assignment scored with its copies, and with the time that its stages take to fit
    their ranks.

    Method and bound are those of `search`.
    """
    options = planner.options
    stages: Sequence[Stage] = ()
    if may_pay_for_memory(options):
        stages = stages_of(planner.graph, assignment, planner)
    whole, cut = with_its_copies(planner, problem, links, assignment)
    return scored(options, whole, cut, stages, search.method, search.bound)


def scored(
    options: Options,
    problem: PartitionProblem,
    assignment: Mapping[str, int],
    stages: Sequence[Stage],
    method: str,
    bound: int,
) -> Partition:
    """Return an assignment scored with the time that its `stages` take to fit their ranks."""
    extra_ns: dict[int, int] = {}
    # What `problem` has in its compute already would count twice.
    if not has_recompute_in_compute(options):
        extra_ns = {index: stage.extra_ns for index, stage in enumerate(stages)}
    return Partition.of(problem, assignment, method=method, bound=bound, extra_ns=extra_ns)


def with_its_copies(
    planner: RecomputePlanner,
    problem: PartitionProblem,
    links: Links,
    assignment: Mapping[str, int],
) -> tuple[PartitionProblem, Mapping[str, int]]:
    """Return the problem with the copies of this cut as nodes of its graph, and the cut with them.

    The search leaves copied nodes out. Here cuts are scored as they run.
    """
    if not planner.graph.copied:
        return problem, assignment
    copying, cut = planner.with_copies(assignment)
    step_ns = partial(planned_step_ns, copying, links)
    return replace(problem, graph=cut.graph, step_ns=step_ns), cut.assignment


def other_objectives(options: Options) -> list[str]:
    """Return the objectives of training that were not asked for; none for inference."""
    if options.is_inference:
        return []
    return [each for each in OBJECTIVES if each not in (options.objective, "total-load")]
