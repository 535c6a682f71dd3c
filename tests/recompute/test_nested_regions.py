"""Regions within regions against all there are, on chains and on any small graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_models import gpt_blocks
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.module_paths import block_of
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import recompute_problem_of
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.choice import cheapest, priced
from pipecompile.recompute.lower_bound import least_ns
from pipecompile.recompute.nested_regions import nested_regions
from pipecompile.recompute.region import Region
from tests.ir.cost_graphs import cost_graphs, stages_of
from tests.memory_model.naive_stage import NaiveStage
from tests.recompute.test_region_search import every_choice
from tests.sweeps import examples

Run = tuple[int, int]
SIZES = st.sampled_from([64, 128, 192, 640, 1280])


def every_nesting(start: int, stop: int, *, inner: bool = False) -> Iterator[tuple[Run, ...]]:
    """All sets of runs between two places of which any two are apart or one within the other."""
    for runs in every_choice(range(start, stop + 1)):
        if not (inner and runs == ((start, stop),)):
            for parts in product(*(list(every_nesting(*run, inner=True)) for run in runs)):
                yield (*runs, *chain(*parts))


def price(graph: CostGraph, runs: Sequence[Run]) -> tuple[int, int]:
    """The peak of a microbatch by the memory model, and the extra time by torch's rules."""
    names = [node.name for node in graph.nodes]
    regions = [names[a:b] for a, b in runs]
    footprint = footprint_of(LiveRanges(graph), (), names, regions)
    kept = footprint.activations.bound
    peak = max(kept, footprint.forward_peak.bound, kept + footprint.backward_peak.bound)
    return peak, extra_ns(graph, [names], 0, regions)


def extra_ns(
    graph: CostGraph, cut: Sequence[Sequence[str]], index: int, regions: Sequence[Sequence[str]]
) -> int:
    """Each region of a stage is recomputed until the last that is put aside for it."""
    stage = NaiveStage(graph, cut, index, regions)
    found = 0
    for frame in filter(stage.is_recomputed, range(len(regions))):
        number, after, *_ = stage.saves_of(frame)[-1]
        found += sum(graph.by_name[name].forward_ns for name in regions[frame][: number + after])
    return found


@st.composite
def chains(draw: st.DrawFn, length: int = 4) -> CostGraph:
    """Layers that save what they read, and something of their own."""
    values = [draw(SIZES) for _ in range(length)]
    own = [draw(SIZES) for _ in range(length)]
    nodes = [
        Node(
            name=f"n{index}",
            forward_ns=draw(st.integers(1, 9)),
            backward_ns=1,
            parameter_bytes=0,
            saved_bytes=0,
            group=None,
            forward_peak_bytes=values[index] + own[index],
            backward_peak_bytes=draw(SIZES),
            saved=tuple(place for place in (index - 1, length + index) if place >= 0),
        )
        for index in range(length)
    ]
    tensors = [
        Tensor(producer=a.name, consumers=(b.name,), bytes=size, gradient_bytes=size, storage=index)
        for index, ((a, b), size) in enumerate(zip(pairwise(nodes), values, strict=False))
    ]
    return CostGraph(
        allocator="cpu", nodes=tuple(nodes), tensors=tuple(tensors), storages=(*values, *own)
    )


@settings(max_examples=examples(20), deadline=None)
@given(chains(), st.data())
def test_on_chains_nothing_that_fits_is_faster(graph: CostGraph, data: st.DataObject) -> None:
    names = [node.name for node in graph.nodes]
    problem = recompute_problem_of(LiveRanges(graph), (), names, has_gradients=True)
    every = {runs: price(graph, runs) for runs in every_nesting(0, len(names))}
    available = data.draw(st.sampled_from(sorted({peak for peak, _ in every.values()})))
    best = nested_regions(problem, names, available)
    assert best is not None
    peak, ns = price(graph, best.regions)
    assert (best.ns, peak <= best.peak <= available) == (ns, True)
    assert ns == min(ns for peak, ns in every.values() if peak <= available)
    assert nested_regions(problem, names, min(peak for peak, _ in every.values()) - 1) is None
    assert least_ns(problem, 1, available) is not None
    assert least_ns(problem, 1, max(problem.backward_peak) - 1) is None


@settings(max_examples=examples(40), deadline=None)
@given(cost_graphs(), st.data())
def test_times_are_true_and_never_longer_than_without_regions_within_regions(
    graph: CostGraph, data: st.DataObject
) -> None:
    """Of one of two stages, or of all."""
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    problem = recompute_problem_of(LiveRanges(graph), before, names, has_gradients=True)
    choices = [
        priced(problem, [Region(*run) for run in runs]) for runs in every_choice(problem.boundaries)
    ]
    available = data.draw(st.sampled_from(sorted(choice.peak for choice in choices)))
    best = nested_regions(problem, names, available)
    assert best is not None
    regions = [names[a:b] for a, b in best.regions]
    assert best.ns == extra_ns(graph, cut, index, regions)
    assert best.ns <= min(choice.ns for choice in choices if choice.peak <= available)
    footprint = footprint_of(LiveRanges(graph), before, names, regions)
    assert footprint.activations.bound == best.kept
    assert footprint.activations.bound + footprint.backward_peak.bound <= best.peak <= available


def test_blocks_of_a_gpt_fit_where_regions_apart_do_not() -> None:
    """In 38 % of what they take, and with more memory no slower than the best regions apart."""
    graph = gpt_blocks()
    names, blocks = (
        [node.name for node in graph.nodes],
        [block_of(node.module) for node in graph.nodes],
    )
    problem = recompute_problem_of(LiveRanges(graph), (), names, has_gradients=True)
    plain = priced(problem, ())
    for percent in (80, 50, 38):
        available = plain.peak * percent // 100
        apart, best = (
            cheapest(problem, blocks, 1, available),
            nested_regions(problem, blocks, available),
        )
        assert best is not None
        assert (apart is None) == (percent == 38)
        assert apart is None or best.ns <= apart.ns
        peak, ns = price(graph, best.regions)
        assert (peak <= available, ns) == (True, best.ns)
