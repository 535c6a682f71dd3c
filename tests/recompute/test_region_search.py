"""Choices of regions against all there are, and those put together from segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.encodings import Encoding
from pipecompile.ir.graph import CostGraph
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import (
    RecomputeProblem,
    StoredTensor,
    recompute_problem_of,
)
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.choice import priced
from pipecompile.recompute.menus import menu
from pipecompile.recompute.region import Region
from pipecompile.recompute.region_search import RegionSearch
from tests.ir.cost_graphs import cost_graphs, encoded_runs_of, stages_of
from tests.sweeps import examples

RegionChoice = tuple[int, int, int]


def every_choice(boundaries: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """All sets of disjoint regions between boundaries."""
    runs = list(combinations(boundaries, 2))

    def extended(after: int) -> Iterator[tuple[tuple[int, int], ...]]:
        yield ()
        for run in runs:
            if run[0] >= after:
                yield from ((run, *rest) for rest in extended(run[1]))

    yield from extended(0)


def price(
    graph: CostGraph,
    before: Sequence[str],
    names: Sequence[str],
    regions: Sequence[Sequence[str]],
    encoded_runs: Sequence[tuple[tuple[str, ...], tuple[Encoding, ...]]] = (),
) -> RegionChoice:
    """What is kept, the peak and the extra time, by the memory model and by hand."""
    footprint = footprint_of(LiveRanges(graph), before, names, regions, encoded_runs)
    kept = footprint.activations.bound
    highest = max(kept, footprint.forward_peak.bound, kept + footprint.backward_peak.bound)
    return kept, highest, sum(extra_ns(graph, region) for region in regions)


def extra_ns(graph: CostGraph, region: Sequence[str]) -> int:
    """The forward once more, up to what the last saver needs to have run."""
    nodes = [graph.by_name[name] for name in region]
    while nodes and nodes[-1].saves_at == "never":
        nodes.pop()
    if nodes and nodes[-1].saves_at == "before":
        nodes.pop()
    return sum(node.forward_ns for node in nodes)


def undominated(choices: set[RegionChoice]) -> set[RegionChoice]:
    return {
        a
        for a in choices
        if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in choices)
    }


@settings(max_examples=examples(120), deadline=None)
@given(cost_graphs(), st.data())
def test_all_that_count_are_found(graph: CostGraph, data: st.DataObject) -> None:
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    problem = recompute_problem_of(LiveRanges(graph), before, names, has_gradients=True)
    sent = problem.sent_bytes
    search = RegionSearch(problem, 0, len(names))
    found: set[RegionChoice] = set()
    for state, front in search.fronts[len(names)].items():
        for row in range(len(front)):
            kept = int(front.kept[row]) + sent
            figures = kept, max(kept, int(front.peak[row])), int(front.ns[row])
            regions = [names[a:b] for a, b in search.regions(len(names), state, row)]
            assert price(graph, before, names, regions) == figures, regions
            found.add(figures)
    every: set[RegionChoice] = set()
    for runs in every_choice(problem.boundaries):
        figures = price(graph, before, names, [names[a:b] for a, b in runs])
        choice = priced(problem, [Region(*run) for run in runs])
        assert (choice.kept, max(choice.kept, choice.peak), choice.ns) == figures, runs
        every.add(figures)
    assert undominated(found) == undominated(every)


@settings(max_examples=examples(120), deadline=None)
@given(cost_graphs(), st.data())
def test_beside_other_forms_what_is_kept_is_exact_and_no_peak_is_too_low(
    graph: CostGraph, data: st.DataObject
) -> None:
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    encoded_runs = data.draw(encoded_runs_of(names, ()))
    problem = recompute_problem_of(
        LiveRanges(graph), before, names, has_gradients=True, encoded_runs=encoded_runs
    )
    sent = problem.sent_bytes
    search = RegionSearch(problem, 0, len(names))
    for state, front in search.fronts[len(names)].items():
        for row in range(len(front)):
            regions = [names[a:b] for a, b in search.regions(len(names), state, row)]
            kept, peak, ns = price(graph, before, names, regions, encoded_runs)
            assert (kept, ns) == (int(front.kept[row]) + sent, int(front.ns[row])), regions
            assert peak <= max(kept, int(front.peak[row])), regions


@settings(max_examples=examples(120), deadline=None)
@given(cost_graphs(), st.data())
def test_what_segments_give_together_is_true(graph: CostGraph, data: st.DataObject) -> None:
    """Kept bytes and times are exact, and peaks are never too low."""
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    problem = recompute_problem_of(LiveRanges(graph), before, names, has_gradients=True)
    inner = [place for place in problem.boundaries if 0 < place < len(names)]
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(inner))))) if inner else ()
    found = menu(problem, cuts, frozenset(), None)
    sent = problem.sent_bytes
    for state, front in found.fronts.items():
        for row in range(len(front)):
            regions = [names[a:b] for a, b in found.regions(state, row)]
            kept, peak, ns = price(graph, before, names, regions)
            assert (kept, ns) == (int(front.kept[row]) + sent, int(front.ns[row])), regions
            assert peak <= max(kept, int(front.peak[row])), regions
    assert min(int(front.ns.min()) for front in found.fronts.values()) == 0


def test_what_is_copied_in_the_end_counts_in_segments_that_do_not_read_it() -> None:
    """Kept by none, it lives until the last of them is done."""
    problem = RecomputeProblem(
        forward_ns=(1, 1, 1),
        saves_at=("never",) * 3,
        forward_peak=(640, 0, 6400),
        gradients_before=(0, 0, 0),
        backward_peak=(0, 0, 0),
        gradients_after=(0, 0, 0),
        tensors=(StoredTensor(640, 0, (1,), (), is_sent=False, copied_at=2),),
        buffer_copies=(0, 0, 0),
        boundaries=(0, 1, 2, 3),
        sent_copies=64,
    )
    (whole,), (parted,) = (
        menu(problem, cuts, frozenset(), None).fronts.values() for cuts in ((), (2,))
    )
    assert priced(problem, ()).peak == whole.peak.min() == 640 + 6400
    assert parted.peak.min() >= whole.peak.min()
