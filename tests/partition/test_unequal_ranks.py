"""Cuts over devices of several kinds, against all cuts by each rank's own costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.links import Link, Links
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.partition.objective import lower_bound, objective_value, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from tests.chains_of_nodes import chain

LINKS = Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=1))


@st.composite
def unequal_chains(draw: st.DrawFn) -> UnequalCosts:
    count = draw(st.integers(3, 8))
    sizes = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    time = st.integers(0, 60)
    times = st.lists(st.tuples(time, time), min_size=count, max_size=count)
    kinds = [chain(draw(times), sizes) for _ in range(draw(st.integers(2, 3)))]
    ranks = draw(st.integers(2, min(3, count)))
    of_rank = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=ranks, max_size=ranks))
    used = sorted(set(of_rank))
    return UnequalCosts.of([kinds[kind] for kind in used], [used.index(kind) for kind in of_rank])


def loads_by_hand(costs: UnequalCosts, ends: Sequence[int]) -> list[int]:
    """The load of each stage between two `ends`, on the device of its rank."""
    loads = []
    count = len(costs.nodes)
    for rank, (start, stop) in enumerate(pairwise(ends)):
        nodes = costs.kinds[costs.rank_kinds[rank]].nodes[start:stop]
        load = sum(node.forward_ns + node.backward_ns for node in nodes)
        for edge in (start, stop):
            if 0 < edge < count:
                sent = costs.tensors[edge - 1]
                load += sum(size + 1 for size in (sent.bytes, sent.gradient_bytes) if size)
        loads.append(load)
    return loads


@settings(max_examples=60)
@given(unequal_chains(), st.sampled_from(["variance", "max-load"]))
def test_the_cut_is_the_best_of_all_or_within_its_gap(costs: UnequalCosts, objective: str) -> None:
    ranks, count = len(costs.rank_kinds), len(costs.nodes)
    problem = PartitionProblem(costs, ranks, objective=objective, links=LINKS)
    found = solve(problem)
    every = [(0, *inner, count) for inner in combinations(range(1, count), ranks - 1)]
    best = min(objective_value(objective, loads_by_hand(costs, ends)) for ends in every)
    assert lower_bound(problem) <= found.search.bound <= best
    assert best <= found.search.value
    # A chain has one order, so the dynamic program is exact.
    assert found.search.value == best
    stages = [found.assignment[node.name] for node in costs.nodes]
    ends = [0, *(index for index in range(1, count) if stages[index] != stages[index - 1]), count]
    assert list(found.loads_with_transfers_ns) == loads_by_hand(costs, ends)


@given(unequal_chains())
def test_the_bound_holds_for_every_cut_even_without_an_order(costs: UnequalCosts) -> None:
    ranks = len(costs.rank_kinds)
    for objective in ("variance", "max-load"):
        problem = PartitionProblem(costs, ranks, objective=objective, communication="none")
        bound = lower_bound(problem)
        for stages in product(range(ranks), repeat=min(6, len(costs.nodes))):
            rest = [ranks - 1] * (len(costs.nodes) - len(stages))
            assignment = dict(zip(costs.by_name, [*stages, *rest], strict=True))
            assert bound <= objective_value(objective, stage_loads(problem, assignment))


def test_a_rank_that_is_twice_as_fast_has_twice_as_much() -> None:
    fast, slow = chain([(1, 2)] * 9, [0] * 9), chain([(2, 4)] * 9, [0] * 9)
    for kinds, sizes in (([0, 1], [6, 3]), ([1, 0], [3, 6])):
        costs = UnequalCosts.of([fast, slow], kinds)
        found = solve(PartitionProblem(costs, 2, objective="max-load"))
        stages = list(found.assignment.values())
        assert [stages.count(stage) for stage in range(2)] == sizes
        assert (found.search.value, found.search.bound) == (18, 18)


def test_as_a_graph_costs_are_the_least_of_any_device() -> None:
    one, other = chain([(1, 9), (5, 5)], [7, 7]), chain([(4, 2), (5, 6)], [7, 7])
    costs = UnequalCosts.of([one, other], [0, 1, 0])
    assert [(node.forward_ns, node.backward_ns) for node in costs.nodes] == [(1, 2), (5, 5)]
    assert [costs.on_rank(rank) for rank in range(3)] == [one, other, one]
    assert one.on_rank(5) is one


def test_what_is_no_plan_of_unequal_ranks_is_refused() -> None:
    one = chain([(1, 2)] * 4, [5] * 4)
    with pytest.raises(ValueError, match="hold different tensors"):
        UnequalCosts.of([one, chain([(1, 2)] * 4, [6] * 4)], [0, 1])
    with pytest.raises(ValueError, match=r"of 2 kinds of devices, but ranks have the kinds \[0\]"):
        UnequalCosts.of([one, chain([(2, 4)] * 4, [5] * 4)], [0, 0])
    costs = UnequalCosts.of([one, chain([(2, 4)] * 4, [5] * 4)], [0, 1])
    with pytest.raises(InputError, match="the costs are of 2 ranks, but there are 3"):
        PartitionProblem(costs, 3)
    with pytest.raises(InputError, match="several kinds have one stage each"):
        PartitionProblem(costs, 4, placement=(0, 1, 0, 1))
