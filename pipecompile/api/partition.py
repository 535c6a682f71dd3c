"""The cut of a plan: composes the partitioner with recompute, the memory model and the schedule.

`api.draft` imports it when it drafts a plan, and not before: solvers need numpy and networkx, which
reading a plan does not. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import msgspec

from pipecompile.api.partition_problem import (
    has_recompute_in_compute,
    may_pay_for_memory,
    problem_of,
    rank_excess_bytes,
)
from pipecompile.api.recompute import recompute_planner
from pipecompile.errors import InfeasibleError, PipecompileError
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options, Search
from pipecompile.partition.alternatives import fastest_alternative
from pipecompile.partition.cap_correction import corrected_cut
from pipecompile.partition.missing_memory import missing_bytes
from pipecompile.partition.objective import stage_loads
from pipecompile.partition.problem import OBJECTIVES, PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.stages import stages_of

__all__ = ["best_cut", "cut", "with_memory_time"]

SHORT_SECONDS = 0.5  # of work on each other objective, and on each change that might make a cut fit
SUGGESTIONS = 2
SEARCHES = 3  # for something to suggest: each takes as long as a part of a plan


def cut(
    planner: RecomputePlanner, links: Links, assignment: Mapping[str, int] | None = None
) -> Partition:
    """Return the cut of a plan, its values by all objectives, and a faster objective if any.

    Its stages recompute what `planner` chooses. With `assignment` the cut is that one, and the best
    cut that is found only bounds it. Raise InfeasibleError if a constraint cannot be met; it says
    which one, and what would fit.
    """
    options = planner.options
    problem, best = best_cut(planner.graph, options, links, planner.view.placement)
    # `planner` is settled: it searches longer than the planner by which cuts were compared.
    partition = with_memory_time(planner, problem, assignment or best.assignment, best)
    assert problem.step_ns is not None
    step_ns = problem.step_ns(partition.assignment)
    # A hint for the user only, so it gets little work.
    fastest = fastest_alternative(problem, _other_objectives(options), seconds=SHORT_SECONDS)
    search = msgspec.structs.replace(
        partition.search,
        values={**partition.search.values, "step_ns": step_ns},
        faster=fastest if fastest is not None and fastest.step_ns < step_ns else None,
    )
    if options.is_inference:
        search = _for_inference(search, options.objective, problem, partition.assignment)
    return replace(partition, search=search)


def _for_inference(
    search: Search, objective: str, problem: PartitionProblem, assignment: Mapping[str, int]
) -> Search:
    """Return a search under the objective that was asked for, with the latency of its cut.

    Both sides of a boundary pay for its transfers, and a microbatch waits for them once. So the
    latency is half of Σ load and all compute: with stages of 5 and 6 ns and a transfer of 2 ns in
    between, loads are 7 and 8 ns, and the latency is (15 + 11) / 2 = 13 ns.
    """
    compute = sum(node.forward_ns for node in problem.graph.nodes)
    loads = stage_loads(replace(problem, communication="relay"), assignment)
    latency = (sum(loads) + compute) // 2
    search = msgspec.structs.replace(
        search, objective=objective, values={**search.values, "latency_ns": latency}
    )
    if objective != "latency":
        return search
    bound = -(-(search.bound + compute) // 2)
    return msgspec.structs.replace(
        search,
        value=latency,
        bound=bound,
        gap=(latency - bound) / latency if latency else 0.0,
        proven=latency == bound,
    )


def best_cut(
    graph: CostGraph, options: Options, links: Links, placement: Sequence[int]
) -> tuple[PartitionProblem, Partition]:
    """Return the problem of the options and its cut.

    Raise InfeasibleError, with what would fit, if there is no cut.

    A searched schedule may hold fewer microbatches than the named one that represents it. If
    nothing fits by that, a cut will do that has room for one microbatch in each stage.
    """
    planner = recompute_planner(graph, options, placement)
    for one_in_flight in (False, True) if options.schedule == "search" else (False,):
        problem = problem_of(graph, options, links, placement, one_in_flight=one_in_flight)
        excess_bytes = partial(_excess_by_rank, planner, one_in_flight)
        try:
            return problem, corrected_cut(problem, solve(problem), excess_bytes)
        except InfeasibleError as error:
            refusal = error
    raise InfeasibleError(f"{refusal}{_what_would_fit(graph, options, links)}")


def _excess_by_rank(
    planner: RecomputePlanner, one_in_flight: bool, partition: Partition
) -> list[int]:
    """Return, for each rank, the bytes that the stages of a cut need over its cap."""
    placement = planner.view.placement
    footprints: list[dict[int, Footprint]] = [{} for _ in range(max(placement) + 1)]
    recomputed: list[set[int]] = [set() for _ in footprints]
    for index, stage in enumerate(stages_of(planner.graph, partition.assignment, planner)):
        footprints[placement[index]][index] = stage.footprint
        if stage.recomputes:
            recomputed[placement[index]].add(index)
    return [
        rank_excess_bytes(
            planner.graph,
            planner.options,
            placement,
            footprints[rank],
            recomputed[rank],
            one_in_flight=one_in_flight,
        )
        for rank in range(len(footprints))
    ]


def with_memory_time(
    planner: RecomputePlanner,
    problem: PartitionProblem,
    assignment: Mapping[str, int],
    partition: Partition,
) -> Partition:
    """Return this assignment scored with the time that its stages take to fit their ranks.

    Method and bound are those of `partition`.
    """
    extra_ns: dict[int, int] = {}
    # What `problem` has in its compute already would count twice.
    if may_pay_for_memory(planner.options) and not has_recompute_in_compute(planner.options):
        stages = stages_of(planner.graph, assignment, planner)
        extra_ns = {index: stage.extra_ns for index, stage in enumerate(stages)}
    search = partition.search
    return Partition.of(
        problem, assignment, method=search.method, bound=search.bound, extra_ns=extra_ns
    )


def _other_objectives(options: Options) -> list[str]:
    """Return the objectives of training that were not asked for; none for inference."""
    if options.is_inference:
        return []
    return [each for each in OBJECTIVES if each not in (options.objective, "total-load")]


# What to suggest where no cut fits


def _what_would_fit(graph: CostGraph, options: Options, links: Links) -> str:
    """Return the nearest options that can be met, as the end of a sentence.

    It is "" where memory is not capped. Tried are `recompute=auto`, more stages, and both. Lower
    bounds of what ranks hold rule most of them out. Of the others those would fit for which a short
    search finds a cut. If it finds none, what was not searched may fit.
    """
    if options.memory_bytes is None:
        return ""
    # A list of caps or a matrix of links is for a fixed number of ranks.
    is_fixed = links.ranks is not None or isinstance(options.memory_bytes, tuple)
    most = options.k if is_fixed else 2 * options.k + 2
    single, double = _with_more_room(options, most)
    possible = (text for text, changed in single.items() if _may_fit(graph, changed, links))
    fitting: list[str] = []
    for text in islice(possible, SEARCHES):
        if len(fitting) < SUGGESTIONS and _is_feasible(graph, single[text], links):
            fitting.append(text)
    if fitting:
        return f"; this would fit: {' or '.join(fitting)}"
    both = (text for text, changed in double.items() if _may_fit(graph, changed, links))
    unsearched = list(islice(chain(possible, both), SUGGESTIONS))
    if unsearched:
        return f"; this may fit: {' or '.join(unsearched)}"
    return (
        f"; neither up to {most} stages nor recompute would fit: allow more memory or more, "
        f"smaller microbatches"
    )


def _with_more_room(options: Options, most: int) -> tuple[dict[str, Options], dict[str, Options]]:
    """Return changes by which stages hold less: of one thing, and of two, up to `most` stages."""
    counts = range(options.k + 1, most + 1)
    more = {f"k={k}": msgspec.structs.replace(options, k=k) for k in counts}
    if options.recompute == "auto":
        return more, {}
    recompute = {"recompute=auto": msgspec.structs.replace(options, recompute="auto")}
    both = {
        f"{text} with recompute=auto": msgspec.structs.replace(changed, recompute="auto")
        for text, changed in more.items()
    }
    return recompute | more, both


def _may_fit(graph: CostGraph, options: Options, links: Links) -> bool:
    """Return whether lower bounds of what ranks hold leave a cut possible."""
    with suppress(PipecompileError):
        return missing_bytes(problem_of(graph, options, links)) == 0
    return False


def _is_feasible(graph: CostGraph, options: Options, links: Links) -> bool:
    """Return whether a short search finds a cut.

    First with lower bounds of what stages hold; only what then fits is priced, which takes longer.
    """
    with suppress(PipecompileError):
        problem = replace(problem_of(graph, options, links), objective="max-load")
        assert problem.memory is not None
        unpriced = replace(problem.memory, price=None, freeable=())
        # Each raises InfeasibleError where it finds no cut.
        for variant in (replace(problem, memory=unpriced), problem):
            solve(variant, seconds=SHORT_SECONDS, explained=False)
        return True
    return False
