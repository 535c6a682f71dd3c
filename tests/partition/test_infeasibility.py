"""A proof that nothing fits, against a list of all cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.partition.infeasibility import proven_shortage
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.unit_graph import UnitGraph
from tests.cuts import chain, cuts, problems, with_part_of_memory


@given(st.booleans().flatmap(lambda shared: problems(shared=shared)), st.integers(1, 4))
def test_what_is_proven_has_no_cut(problem: PartitionProblem, part: int) -> None:
    problem = with_part_of_memory(problem, part)
    try:
        shortage = proven_shortage(UnitGraph.of(problem))
    except InfeasibleError:
        return  # too few units, or pins that contradict each other
    if shortage is not None:
        assert next(cuts(problem), None) is None, shortage


def constraint(caps: tuple[int, ...], in_flight: tuple[int, ...]) -> PartitionProblem:
    graph = chain([1, 1, 1, 1], held=[50, 10, 10, 40])
    memory = MemoryConstraint.simple(graph, caps, in_flight, 1)
    return PartitionProblem(graph, 4, placement=(0, 1, 1, 0), memory=memory)


def test_nodes_that_can_only_lie_on_one_rank_are_named() -> None:
    problem = constraint((80, 200), (1, 1, 1, 1))
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    assert str(caught.value) == (
        "no cut fits: rank 0 may hold 80 B, but the nodes that can only lie there hold at least "
        "90 B, the largest of them n0 (50 B), n3 (40 B); allow more memory or smaller microbatches"
    )


def test_ranks_that_are_too_small_together_are_proven() -> None:
    problem = replace(constraint((90, 19), (1, 1, 1, 1)))
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    assert str(caught.value) == (
        "no cut fits: the 2 ranks may hold 109 B together, but all nodes hold at least 110 B; "
        "allow more memory or more ranks"
    )
