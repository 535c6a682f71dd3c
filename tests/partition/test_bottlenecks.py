"""Bottlenecks against paths, and what they prove against a list of all cuts."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph
from pipecompile.partition.bottlenecks import bottlenecks, proves_no_fit
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import UnitGraph
from tests.cuts import chain, cuts, graphs, letter_graph, problems, with_part_of_memory


def test_what_runs_beside_others_is_no_bottleneck() -> None:
    graph = UnitGraph.of(PartitionProblem(letter_graph("abcdef", "ab ac bd cd de df"), 2))
    assert [graph.units[unit][0] for unit in bottlenecks(graph)] == ["a", "d"]


@given(graphs(most=6))
def test_a_bottleneck_has_one_place_in_all_orders(graph: CostGraph) -> None:
    try:
        unit_graph = UnitGraph.of(PartitionProblem(graph, 1))
    except InfeasibleError:
        return
    units = range(unit_graph.count)
    places: list[set[int]] = [set() for _ in units]
    for order in permutations(units):
        place = {unit: index for index, unit in enumerate(order)}
        if all(place[a] < place[b] for b in units for a in unit_graph.before[b]):
            for unit in units:
                places[unit].add(place[unit])
    assert bottlenecks(unit_graph) == [unit for unit in units if len(places[unit]) == 1]


@given(problems(shared=False), st.integers(1, 6))
def test_what_is_proven_has_no_cut(problem: PartitionProblem, part: int) -> None:
    problem = with_part_of_memory(problem, part)
    try:
        is_proven = proves_no_fit(UnitGraph.of(problem))
    except InfeasibleError:
        return  # too few units, or pins that contradict each other
    if is_proven:
        assert next(cuts(problem), None) is None


def test_a_chain_is_proven_from_the_last_byte_on() -> None:
    """Of 10 + 20 and 30 + 40 bytes the second stage holds 70, of 10 + 20 + 30 the first one 60."""
    graph = chain([1, 1, 1, 1], held=[10, 20, 30, 40])
    proven = {
        cap: proves_no_fit(
            UnitGraph.of(
                PartitionProblem(
                    graph, 2, memory=MemoryConstraint.simple(graph, (cap, cap), (1, 1), 1)
                )
            )
        )
        for cap in (59, 60)
    }
    assert proven == {59: True, 60: False}
