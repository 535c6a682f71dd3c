"""Cut and recompute chosen together, compared with every cut with every choice of regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_options

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Options
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.rank import rank_memory
from pipecompile.memory_model.recompute_problem import recompute_problem_of
from pipecompile.memory_model.stage import footprint_of
from pipecompile.partition.objective import objective_value, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.violations import violations
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.recompute import recompute_planner
from pipecompile.recompute.policies import StageSlice
from pipecompile.schedule.selection import snapshots_of
from tests.ir.cost_graphs import cost_graphs
from tests.recompute.test_region_search import every_choice, extra_ns
from tests.sweeps import examples

MICROBATCHES = 4


def options_of(schedule: str, cap: int, recompute: str = "auto") -> Options:
    return Options(
        k=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        objective="variance",
        recompute=recompute,
        memory_bytes=cap,
        costs="table",
    )


def all_cuts(problem: PartitionProblem) -> Iterator[dict[str, int]]:
    names = [node.name for node in problem.graph.nodes]
    for stages in product(range(problem.k), repeat=len(names)):
        assignment = dict(zip(names, stages, strict=True))
        if not any(violations(replace(problem, memory=None), assignment)):
            yield assignment


def held(
    ranges: LiveRanges, options: Options, stage: int, names: Sequence[list[str]], regions: object
) -> int:
    """The peak of the stage's rank, by the memory model."""
    before = [name for earlier in names[:stage] for name in earlier]
    footprint = footprint_of(ranges, before, names[stage], regions)
    at = snapshots_of(options.schedule, (0, 1), MICROBATCHES, False)[stage]
    allocator = ALLOCATORS[ranges.graph.allocator]
    return rank_memory(
        {stage: footprint}, at, microbatches=MICROBATCHES, allocator=allocator
    ).total.bound


def cheapest(
    ranges: LiveRanges, options: Options, stage: int, names: Sequence[list[str]]
) -> int | None:
    """The least extra time of all choices that fit."""
    before = [name for earlier in names[:stage] for name in earlier]
    boundaries = recompute_problem_of(ranges, before, names[stage], has_gradients=True).boundaries
    choices = [[names[stage][a:b] for a, b in runs] for runs in every_choice(boundaries)]
    timed = sorted(
        (sum(extra_ns(ranges.graph, region) for region in regions), regions) for regions in choices
    )
    fitting = (
        extra
        for extra, regions_of_choice in timed
        if held(ranges, options, stage, names, regions_of_choice) <= options.memory_bytes
    )
    return next(fitting, None)


def best(graph: CostGraph, options: Options, problem: PartitionProblem) -> int | None:
    """The best of all cuts with all choices."""
    values, ranges = [], LiveRanges(graph)
    for assignment in all_cuts(problem):
        names = [
            [node.name for node in graph.nodes if assignment[node.name] == stage]
            for stage in range(2)
        ]
        extra = [cheapest(ranges, options, stage, names) for stage in range(2)]
        if None not in extra:
            loads = stage_loads(problem, assignment)
            values.append(
                objective_value(
                    "variance", [load + more for load, more in zip(loads, extra, strict=True)]
                )
            )
    return min(values, default=None)


def compared(graph: CostGraph, schedule: str, share: float) -> str:
    """Compares the solver with the best of all cuts with all choices; returns how they compare.

    "equal", or "refused" if no cut fits; or "nested" where one microbatch is in flight: regions
    within regions, which are not among these choices, may let more stages fit.
    """
    loose = options_of(schedule, 10**9, "none")
    capless = problem_of(graph, loose, FREE)
    cuts = list(all_cuts(capless))
    assume(cuts)
    sizes = [
        held(
            LiveRanges(graph), loose, stage, [[n for n in cut if cut[n] == s] for s in range(2)], ()
        )
        for cut in cuts
        for stage in range(2)
    ]
    options = options_of(schedule, int(min(sizes) + share * (max(sizes) - min(sizes))))
    expected = best(graph, options, capless)
    try:
        # Without a search, if the cap is below what an empty rank takes.
        result = solve(problem_of(graph, options, FREE)).search
    except InfeasibleError:
        assert expected is None
        return "refused"
    assert result.bound <= result.value
    if expected is None or result.value < expected:
        assert schedule == "1f1b"
        return "nested"
    assert result.value == expected
    return "equal"


@settings(max_examples=examples(20), deadline=None)
@given(cost_graphs(6), st.sampled_from(["1f1b", "gpipe"]), st.floats(0, 1))
def test_the_best_of_all_cuts_with_all_regions_is_found(
    graph: CostGraph, schedule: str, share: float
) -> None:
    assume(len(graph.nodes) > 1)
    compared(graph, schedule, share)


def layers(count: int) -> CostGraph:
    """Alike, each saving what it reads and something larger of its own."""
    nodes = [
        Node(
            name=f"n{index}",
            forward_ns=1,
            backward_ns=1,
            parameter_bytes=0,
            saved_bytes=0,
            group=None,
            forward_peak_bytes=1344,
            backward_peak_bytes=64,
            saved=tuple(storage for storage in (index - 1, count + index) if storage >= 0),
        )
        for index in range(count)
    ]
    tensors = [
        Tensor(producer=a.name, consumers=(b.name,), bytes=64, gradient_bytes=64, storage=index)
        for index, (a, b) in enumerate(pairwise(nodes))
    ]
    return CostGraph(
        allocator="cpu",
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        storages=(*[64] * count, *[1280] * count),
    )


def test_regions_within_regions_prove_nothing() -> None:
    """They are not all tried, not even in a stage of few nodes, so their time is no lower bound."""
    graph, names = layers(6), tuple(f"n{index}" for index in range(6))
    nested = 0
    for cap in range(76_000, 66_000, -128):
        options = replace_options(options_of("1f1b", cap), k=1, microbatches=1)
        result = recompute_planner(graph, options, (0,), settled=True).of(
            StageSlice(0, (), names), cap
        )
        inner = result is not None and any(
            set(a) < set(b) for a in result.regions for b in result.regions
        )
        if result is not None and inner:
            nested += 1
            assert result.least < result.ns
    assert nested
