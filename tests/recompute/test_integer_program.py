"""Regions by integer programming against all there are, and on blocks of a GPT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_models import gpt_blocks
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import (
    RecomputeProblem,
    StoredTensor,
    recompute_problem_of,
)
from pipecompile.recompute import integer_program as refine
from pipecompile.recompute.choice import cheapest, priced, whole
from pipecompile.recompute.integer_program import refined
from pipecompile.recompute.region import Region
from tests.ir.cost_graphs import cost_graphs, stages_of
from tests.recompute.test_region_search import every_choice, price
from tests.sweeps import examples

Priced = dict[tuple[Region, ...], tuple[int, int, int]]
SECONDS = 5


def drawn(graph: CostGraph, data: st.DataObject) -> tuple[RecomputeProblem, Priced]:
    """A stage, and all choices of regions there are, with what they cost."""
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    problem = recompute_problem_of(LiveRanges(graph), before, names, has_gradients=True)
    every = [tuple(Region(*run) for run in runs) for runs in every_choice(problem.boundaries)]
    return problem, {
        runs: price(graph, before, names, [names[a:b] for a, b in runs]) for runs in every
    }


def fitting(every: Priced, in_flight: int, available: int) -> list[tuple[Region, ...]]:
    return [
        runs
        for runs, (kept, peak, _) in every.items()
        if (in_flight - 1) * kept + peak <= available
    ]


@settings(max_examples=examples(40), deadline=None)
@given(cost_graphs(), st.integers(1, 5), st.data())
def test_the_fastest_that_fit_are_found_and_proven(
    graph: CostGraph, in_flight: int, data: st.DataObject
) -> None:
    """From any that are known, or none."""
    problem, every = drawn(graph, data)
    kept, peak, _ = data.draw(st.sampled_from(sorted(every.values())))
    available = (in_flight - 1) * kept + peak
    known = data.draw(st.sampled_from([None, *sorted(fitting(every, in_flight, available))]))
    regions, bound = refined(problem, in_flight, available, known, SECONDS)
    assert regions in fitting(every, in_flight, available)
    assert (
        every[regions][2]
        == bound
        == min(every[runs][2] for runs in fitting(every, in_flight, available))
    )
    least = min((in_flight - 1) * kept + peak for kept, peak, _ in every.values())
    assert refined(problem, in_flight, least - 1, None, SECONDS) == (None, 0)


@settings(max_examples=examples(40), deadline=None)
@given(cost_graphs(), st.integers(1, 5), st.data())
def test_rounded_bytes_and_times_give_a_bound_and_regions_that_fit(
    graph: CostGraph, in_flight: int, data: st.DataObject
) -> None:
    problem, every = drawn(graph, data)
    kept, peak, _ = data.draw(st.sampled_from(sorted(every.values())))
    available = (in_flight - 1) * kept + peak
    known = data.draw(st.sampled_from(sorted(fitting(every, in_flight, available))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine, "BYTE_UNITS", 5)
        patch.setattr(refine, "TIME_UNITS", 5)
        regions, bound = refined(problem, in_flight, available, known, SECONDS)
    assert regions in fitting(every, in_flight, available)
    assert bound <= min(every[runs][2] for runs in fitting(every, in_flight, available))
    assert every[regions][2] <= every[known][2]


@cache
def blocks() -> tuple[RecomputeProblem, Sequence[str]]:
    """Four blocks of a GPT as one stage, and which block each node is of."""
    graph = gpt_blocks()
    problem = recompute_problem_of(
        LiveRanges(graph), (), [node.name for node in graph.nodes], has_gradients=False
    )
    return problem, [block_of(node.module) for node in graph.nodes]


def test_regions_of_parts_of_two_blocks_take_less_time() -> None:
    """At the peak of whole-stage recompute, where the menu of blocks has none."""
    problem, of_blocks = blocks()
    all_again = priced(problem, whole(problem))
    known = cheapest(problem, of_blocks, 8, 7 * all_again.kept + all_again.peak)
    assert known is not None
    regions, bound = refined(
        problem, 8, 7 * all_again.kept + all_again.peak, known.regions, SECONDS
    )
    assert regions is not None
    best = priced(problem, regions)
    assert best.ns == bound < known.ns
    assert 7 * best.kept + best.peak <= 7 * all_again.kept + all_again.peak
    assert refined(problem, 8, 7 * all_again.kept + all_again.peak, known.regions, SECONDS) == (
        regions,
        bound,
    )


def test_copies_of_buffers_count_in_backwards_too() -> None:
    """The first node is the fastest, but a region with it would copy what it frees."""
    nothing = (0, 0, 0)
    problem = RecomputeProblem(
        forward_ns=(1, 5, 9),
        saves_at=("after",) * 3,
        forward_peak=nothing,
        gradients_before=nothing,
        backward_peak=nothing,
        gradients_after=nothing,
        tensors=tuple(
            StoredTensor(size, place, (), (place,), is_sent=False)
            for place, size in enumerate((640, 128, 640))
        ),
        buffer_copies=(640, 0, 0),
        boundaries=(0, 1, 2, 3),
    )
    assert refined(problem, 1, 1280, None, SECONDS) == ((Region(1, 2),), 5)


def test_without_time_what_is_known_stays() -> None:
    problem, of_blocks = blocks()
    plain = priced(problem, ())
    available = (3 * plain.kept + plain.peak) * 6 // 10
    known = cheapest(problem, of_blocks, 4, available)
    assert known is not None
    regions, bound = refined(problem, 4, available, known.regions, 0.001)
    assert regions == known.regions
    assert 0 <= bound <= known.ns
