"""Cuts with granularity "auto": between blocks, of which those at stage ends are split."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from module_trees import SECONDS, in_modules, level_problems, solved_at

from pipecompile.errors import InfeasibleError
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.multilevel_solver import (
    TOLERANCE,
    groups_at_stage_ends,
    solve_multilevel,
    with_groups,
)
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.violations import violations


@given(level_problems())
def test_blocks_are_split_until_the_cut_is_near_the_bound_or_no_group_is_at_its_ends(
    problem: PartitionProblem,
) -> None:
    operators, blocks = solved_at(problem, "operators"), solved_at(problem, "blocks")
    if operators is None:
        assert solved_at(problem, "auto") is None
        return
    partition, groups = solve_multilevel(problem, SECONDS)
    value, bound = partition.search.value, partition.search.bound
    assert not list(violations(problem, partition.assignment))
    assert bound <= operators.search.value
    assert blocks is None or value <= blocks.search.value
    assert partition.search.proven == (value == bound)
    assert partition.search.gap == ((value - bound) / value if value else 0)
    near = (value - bound) * TOLERANCE[problem.objective] <= value
    assert near or not groups_at_stage_ends(
        with_groups(problem, groups), partition.assignment, groups
    )
    assert solved_at(problem, "auto") == partition


def test_only_blocks_where_stages_end_are_split() -> None:
    """Five blocks of two modules of 2 ns: 8 | 12 between blocks, 10 | 10 with two of them split."""
    graph = in_modules(
        *(f"h.{block}.{module}.{op}" for block in range(5) for module in "ab" for op in "xy")
    )
    partition, groups = solve_multilevel(PartitionProblem(graph, 2, objective="max-load"), SECONDS)
    assert (partition.search.value, partition.search.proven) == (10, True)
    assert partition.assignment["n9"] < partition.assignment["n10"]
    assert [len(names) for names in groups] in ([4, 2, 2, 2, 2, 4, 4], [4, 4, 2, 2, 2, 2, 4])


def test_the_bound_of_a_cut_between_blocks_is_about_blocks_and_that_of_auto_about_operators() -> (
    None
):
    """503 | 500 is the best between blocks, and near enough to 501 | 502 that none is split."""
    graph = in_modules(
        "h.0.a",
        "h.0.b",
        "h.0.c",
        "h.1.a",
        times={"h.0.a": 499, "h.0.b": 2, "h.0.c": 2, "h.1.a": 500},
    )
    blocks = solve(PartitionProblem(graph, 2, objective="max-load", granularity="blocks"))
    assert (blocks.search.value, blocks.search.bound, blocks.search.proven) == (503, 503, True)
    partition, groups = solve_multilevel(PartitionProblem(graph, 2, objective="max-load"), SECONDS)
    assert (partition.search.value, partition.search.bound, partition.search.proven) == (
        503,
        502,
        False,
    )
    assert groups == (("n0", "n1", "n2"),)


def test_blocks_are_split_where_they_are_too_few_or_too_large_for_a_rank() -> None:
    graph = in_modules("h.0.a.x", "h.0.a.y", "h.0.b.x", "h.0.b.y", "h.1.a.x")
    with pytest.raises(
        InfeasibleError, match=r"at most 2 stages .*choose k ≤ 2, or a finer granularity"
    ):
        solve(PartitionProblem(graph, 3, granularity="blocks"))
    assert (
        len(solve_multilevel(PartitionProblem(graph, 3), SECONDS)[0].loads_with_transfers_ns) == 3
    )
    with pytest.raises(InfeasibleError, match=r"at most 5 stages; choose k ≤ 5$"):
        solve(PartitionProblem(graph, 6, granularity="auto"))
    heavy = msgspec.structs.replace(
        graph, nodes=tuple(msgspec.structs.replace(n, parameter_bytes=1) for n in graph.nodes)
    )
    memory = MemoryConstraint.simple(heavy, (3, 3), (1, 1), 1)
    with pytest.raises(
        InfeasibleError,
        match="a rank may hold 3 B,",
    ):
        solve(PartitionProblem(heavy, 2, memory=memory, granularity="blocks"))
    partition, groups = solve_multilevel(PartitionProblem(heavy, 2, memory=memory), SECONDS)
    assert list(partition.assignment.values()) == [0, 0, 1, 1, 1]
    assert groups == (("n0", "n1"), ("n2", "n3"))
