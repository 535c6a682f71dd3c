"""The cheapest regions against policies and against all there are."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import recompute_problem_of
from pipecompile.recompute.choice import cheapest, per_block, priced, square_root, whole
from pipecompile.recompute.lower_bound import least_ns
from tests.ir.cost_graphs import cost_graphs, stages_of
from tests.recompute.test_region_search import every_choice, price
from tests.sweeps import examples


@settings(max_examples=examples(200), deadline=None)
@given(cost_graphs(), st.integers(1, 5), st.data())
def test_nothing_that_fits_is_faster(graph: CostGraph, in_flight: int, data: st.DataObject) -> None:
    """With the memory of any choice none takes less time, and no bound takes more."""
    cut = data.draw(stages_of(graph, most=2))
    index = data.draw(st.integers(0, len(cut) - 1))
    before, names = list(chain(*cut[:index])), cut[index]
    problem = recompute_problem_of(LiveRanges(graph), before, names, has_gradients=True)
    blocks = sorted(data.draw(st.sampled_from("abc")) for _ in names)
    every = {
        runs: price(graph, before, names, [names[a:b] for a, b in runs])
        for runs in every_choice(problem.boundaries)
    }
    for policy in (whole(problem), per_block(problem, blocks), square_root(problem, blocks)):
        kept, peak, ns = every[tuple(map(tuple, policy))]
        choice = priced(problem, policy)
        assert (choice.kept, max(choice.kept, choice.peak), choice.ns) == (kept, peak, ns)
    kept, peak, _ = data.draw(st.sampled_from(sorted(every.values())))
    available = (in_flight - 1) * kept + peak
    best = cheapest(problem, blocks, in_flight, available)
    assert best is not None
    fitting = [
        choice for choice in every.values() if (in_flight - 1) * choice[0] + choice[1] <= available
    ]
    assert best.ns == min(ns for *_, ns in fitting)
    bound = least_ns(problem, in_flight, available)
    assert bound is not None and bound <= best.ns
    least = min((in_flight - 1) * kept + peak for kept, peak, _ in every.values())
    assert cheapest(problem, blocks, in_flight, least - 1) is None
