"""The whole search and each method in it, against the list of all cuts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from cuts import Score, chain, cuts, graphs, node, problems, score
from hypothesis import assume, given
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links
from pipecompile.ir.serialization import read
from pipecompile.partition import search
from pipecompile.partition.chains import Chains
from pipecompile.partition.cpsat import FINE, solve_integer_program
from pipecompile.partition.lattice import every_cut, nearby_cuts, nearby_sides
from pipecompile.partition.memory_constraint import MemoryConstraint, Price, StageCandidate
from pipecompile.partition.min_cut_bound import min_cut_bound, with_crossing_bounds
from pipecompile.partition.objective import lower_bound
from pipecompile.partition.orders import shuffled_order, topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.search import PartitionSearch
from pipecompile.partition.solver import solve
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.violations import violations
from pipecompile.partition.windows import Limit

PLACEMENT = Path(__file__).resolve().parents[3] / "shared" / "instances" / "placement"


def _best(problem: PartitionProblem) -> Score | None:
    return min((score(problem, cut) for cut in cuts(problem)), default=None)


def _limit(problem: PartitionProblem, value: int) -> Limit:
    if problem.objective == "total-load":
        return Limit()
    return Limit(squares=value) if problem.objective == "variance" else Limit(most=value)


def _most(problem: PartitionProblem, score: Score) -> int:
    """Return the largest load of a score, which comes second unless it is the objective."""
    return score[problem.objective != "max-load"]


def _solved(problem: PartitionProblem) -> tuple[Score, Partition] | None:
    """The score of the best of all cuts, and the solver's cut; None if neither exists."""
    best = _best(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(problem, seconds=1.0)
        return None
    partition = solve(problem, seconds=1.0)
    assert not list(violations(problem, partition.assignment))
    return best, partition


def _is_best(problem: PartitionProblem) -> None:
    """The best cut is found, ties broken by the other objective, and proven."""
    if (solved := _solved(problem)) is not None:
        best, partition = solved
        assert (partition.search.value, score(problem, partition.assignment)) == (best[0], best)
        assert partition.search.proven


@given(problems())
def test_the_best_of_all_cuts_is_found_and_proven(problem: PartitionProblem) -> None:
    _is_best(problem)


@given(problems(most=12, narrow=True))
def test_the_same_on_narrow_graphs_of_up_to_twelve_nodes(problem: PartitionProblem) -> None:
    _is_best(problem)


@given(problems(scale=10**12))
def test_the_same_where_squares_exceed_64_bits(problem: PartitionProblem) -> None:
    _is_best(problem)


@given(problems(shared=True))
def test_the_best_value_is_found_where_stages_share_ranks(problem: PartitionProblem) -> None:
    if (solved := _solved(problem)) is not None:
        best, partition = solved
        assert partition.search.bound <= best[0] == partition.search.value


@given(problems(shared=True, scale=10**8))
def test_bounds_hold_where_times_are_rounded_for_the_integer_program(
    problem: PartitionProblem,
) -> None:
    best = _best(problem)
    assume(best is not None)
    assert best is not None
    partition = solve(problem, seconds=1.0)
    assert partition.search.bound <= best[0] <= partition.search.value <= 1.001 * best[0]


@given(graphs(6), st.data())
def test_the_best_replicas_are_found(graph: CostGraph, data: st.DataObject) -> None:
    units, bandwidth = (
        len(PartitionProblem(graph, 1).units),
        data.draw(st.sampled_from([None, 10**9])),
    )
    k = data.draw(st.integers(1, min(3, units)))
    ranks = data.draw(st.integers(k, k + 2))
    problem = PartitionProblem(
        graph,
        k,
        objective=data.draw(st.sampled_from(["variance", "max-load", "total-load"])),
        communication=data.draw(st.sampled_from(["relay", "endpoint", "overlap", "none"])),
        links=Links(bandwidth_bytes_per_s=bandwidth, latency_ns=data.draw(st.integers(0, 2))),
        replica_ranks=ranks,
        microbatches=data.draw(st.integers(1, 3)),
    )
    every = [r for r in itertools.product(range(1, ranks + 1), repeat=k) if sum(r) <= ranks]
    best = min(score(problem, cut, replicas) for cut in cuts(problem) for replicas in every)
    partition = solve(problem, seconds=1.0)
    assert score(problem, partition.assignment, partition.replicas) == best
    assert partition.search.proven
    assert sum(partition.replicas) <= ranks


@given(problems())
def test_all_ideals_within_a_limit_hold_the_best_cut(problem: PartitionProblem) -> None:
    best = _best(problem)
    assume(best is not None)
    assert best is not None
    unit_graph, limit = UnitGraph.of(problem), _limit(problem, best[0])
    for within in (Limit(), limit, with_crossing_bounds(unit_graph, limit)):
        chains = every_cut(unit_graph, within)
        assert chains is not None
        chain = PricedSearch(problem, 10**6).best(chains, within)
        assert chain is not None
        assert chain.most == _most(problem, best)


@given(problems(), st.booleans())
def test_the_integer_program_finds_and_bounds_the_best_cut(
    problem: PartitionProblem, started: bool
) -> None:
    assume(problem.memory is None or problem.memory.price is None)
    every = list(cuts(problem))
    unit_graph = UnitGraph.of(problem) if every else None
    if unit_graph is None:
        return
    best = min(score(problem, cut)[0] for cut in every)
    known = tuple(every[0][unit[0]] for unit in unit_graph.units) if started else None
    answer = solve_integer_program(unit_graph, known, Limit(), 5.0, FINE)
    assert answer.stages is not None
    assert score(problem, unit_graph.assignment(answer.stages))[0] == best == answer.bound


@given(problems(), st.integers(0, 99))
def test_prefixes_and_what_lies_near_them_hold_no_better_cut_and_their_own(
    problem: PartitionProblem, seed: int
) -> None:
    """The best cut of an order into intervals is found, and the search near it loses nothing."""
    best = _best(problem)
    assume(best is not None)
    assert best is not None
    unit_graph, priced_search = UnitGraph.of(problem), PricedSearch(problem, 10**6)
    for order in topological_orders(unit_graph):
        place = {unit: index for index, unit in enumerate(order)}
        chain = cut_order(Prefixes(unit_graph, order), Limit(), priced_search.best)
        every = [
            score(problem, cut)
            for cut in cuts(problem)
            if sorted(stages := [cut[unit_graph.units[unit][0]] for unit in order]) == stages
        ]
        assert place.keys() == set(range(unit_graph.count))
        if chain is None:
            assert not every
            continue
        assert chain.most == _most(problem, min(every))
        stages = np.searchsorted(chain.rows[1:-1], np.arange(unit_graph.count), side="right")[
            np.argsort(order)
        ]
        shuffled = shuffled_order(unit_graph, stages.tolist(), np.random.default_rng(seed))
        chains = nearby_cuts(unit_graph, nearby_sides(unit_graph, shuffled, chain.rows, 2))
        assert chains is not None
        better = priced_search.best(chains, _limit(problem, min(every)[0]))
        assert better is not None
        assert problem.objective != "max-load" or best[0] <= better.most


@given(problems())
def test_bounds_hold(problem: PartitionProblem) -> None:
    best = _best(problem)
    assume(best is not None)
    assert best is not None
    unit_graph, known = UnitGraph.of(problem), lower_bound(problem)
    assert known <= best[0]
    for excess in (0, 1, 100):
        assert min_cut_bound(unit_graph, _limit(problem, best[0] + excess), known, 6) <= best[0]


def test_ideals_that_come_again_cost_the_budget_and_are_searched_once() -> None:
    """A chain has one order, so each shuffle leaves the ideals near its boundaries as they were."""
    problem = PartitionProblem(chain([index * 7919 % 101 for index in range(40)], size=3), 3)
    once = PartitionSearch(UnitGraph.of(problem), 1.0)
    once._try_orders()
    assert not once.is_proven
    before = once.spent
    with patch.object(search, "nearby_cuts", wraps=nearby_cuts) as enumerated:
        once._try_nearby_cuts(0.1)
    assert enumerated.call_count == 1
    assert 0.1 <= once.spent - before < 0.12


def test_the_same_input_gives_the_same_output() -> None:
    graph = chain([index * 7919 % 101 for index in range(200)], size=3)
    problem = PartitionProblem(graph, 5, links=Links.of(Link(bandwidth_bytes_per_s=10**9)))
    assert solve(problem) == solve(replace(problem))


def test_long_orders_are_cut_where_little_crosses_and_then_nearby() -> None:
    graph = chain([1 + index * 7919 % 101 for index in range(3000)], size=3)
    problem = PartitionProblem(
        graph, 8, objective="max-load", links=Links.of(Link(bandwidth_bytes_per_s=10**9))
    )
    unit_graph = UnitGraph.of(problem)
    prefixes = Prefixes(unit_graph, range(unit_graph.count))
    priced_search = PricedSearch(problem, 0)
    every, some = (
        cut_order(prefixes, Limit(), priced_search.best, pairs) for pairs in (10**9, 10**5)
    )
    assert every is not None and some is not None
    assert every.most <= some.most <= 1.01 * every.most
    assert Chains(prefixes).pairs(Limit()) > 10**6


def test_pins_are_kept_in_order_and_contradictions_named() -> None:
    graph = chain([1] * 6)
    partition = solve(PartitionProblem(graph, 3, pin={"n1": 1, "n3": -1}))
    assert (partition.assignment["n1"], partition.assignment["n3"]) == (1, 2)
    with pytest.raises(
        InfeasibleError, match="n1 in stage 2 and n3 in stage 0, but n3 comes after n1"
    ):
        solve(PartitionProblem(graph, 3, pin={"n1": 2, "n3": 0}))
    with pytest.raises(
        InfeasibleError, match="no cut into k=3 non-empty stages meets the pins n0=1; drop one"
    ):
        solve(PartitionProblem(graph, 3, pin={"n0": 1}))


def test_inputs_lie_in_the_first_stage_and_outputs_in_the_last() -> None:
    nodes = (
        node("late", 0, group="inputs"),
        *(node(f"n{i}", 5) for i in range(4)),
        node("out", 0, group="outputs"),
    )
    partition = solve(PartitionProblem(CostGraph(nodes=nodes, tensors=()), 3))
    assert (partition.assignment["late"], partition.assignment["out"]) == (0, 2)


def test_a_cap_moves_the_cut() -> None:
    graph = chain([1, 1, 1, 1], held=[60, 10, 10, 10])
    loads = {
        cap: solve(
            PartitionProblem(graph, 2, memory=MemoryConstraint.simple(graph, (cap,) * 2, (1, 1), 1))
        ).loads_with_transfers_ns
        for cap in (70, 69)
    }
    assert loads == {70: (2, 2), 69: (1, 3)}


def test_a_cap_that_nobody_can_meet_is_answered_with_how_much_is_missing_and_where() -> None:
    graph = chain([1, 1, 1, 1], held=[10, 10, 90, 10])
    with pytest.raises(InfeasibleError) as caught:
        solve(
            PartitionProblem(graph, 2, memory=MemoryConstraint.simple(graph, (70, 70), (1, 1), 1))
        )
    assert str(caught.value) == (
        "a rank may hold 70 B, but the best cut into k=2 stages that was found needs 100 B, "
        "30 B more, in stage 1, where n2 is the largest node (90 B alone)"
    )


def test_a_stage_pays_for_its_memory_and_the_search_weighs_that() -> None:
    """The heavy stage could pay 5 to fit; the cut that needs no payment is worse by less."""
    graph = chain([4, 4, 3, 3], held=[1, 1, 1, 1])

    def price(candidate: StageCandidate) -> Price:
        return Price(5, 5) if candidate.nodes == ("n0", "n1") else Price(0, 0)

    memory = replace(MemoryConstraint.simple(graph, (9, 9), (1, 1), 1), price=price)
    partition = solve(PartitionProblem(graph, 2, objective="max-load", memory=memory))
    assert partition.loads_with_transfers_ns == (4, 10)
    assert partition.search.proven


def test_stages_without_parameters_are_refused_where_all_must_have_some() -> None:
    graph = chain([5, 5, 5, 1], held=[1, 0, 0, 1])
    assert solve(PartitionProblem(graph, 2, parameters_everywhere=True)).assignment["n3"] == 1
    with pytest.raises(InfeasibleError, match="only 2 of 4 units have any"):
        solve(PartitionProblem(graph, 3, parameters_everywhere=True))


@pytest.mark.skipif(
    not PLACEMENT.is_dir(), reason="the published instances lie beside the repository, not in it"
)
@pytest.mark.parametrize(
    "name", ["bert24", "gnmt", "inceptionv3", "resnet50", "operators-bert_l-3"]
)
def test_published_instances_are_solved_to_their_best_known_values(name: str) -> None:
    name = f"{name if '-' in name else f'layers-{name}'}_inference"
    best = json.loads((PLACEMENT / "best_known.json").read_text())[name]
    graph = read(PLACEMENT / f"{name}.json", CostGraph)
    problem = PartitionProblem(
        graph,
        best["k"],
        objective="max-load",
        communication="endpoint",
        links=Links.of(Link(bandwidth_bytes_per_s=best["bandwidth_bytes_per_s"])),
        memory=MemoryConstraint.simple(
            graph, (best["memory_bytes"],) * best["k"], (1,) * best["k"], 1
        ),
    )
    search = solve(problem).search
    assert (search.value, search.proven) == (best["best_max_load_ns"], True)
