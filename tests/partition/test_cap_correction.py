"""Cuts of ranks whose bounds are too low."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipecompile.errors import InfeasibleError
from pipecompile.partition.cap_correction import corrected_cut
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from tests.cuts import chain

PLACEMENT = (0, 1, 0, 1)


def missing_bytes(partition: Partition) -> Sequence[int]:
    """Each node holds 10 bytes on rank 0, and on rank 1 three times what its bound says."""
    counts = [0, 0]
    for stage in partition.assignment.values():
        counts[PLACEMENT[stage]] += 1
    return [10 * counts[0] - 90, 30 * counts[1] - 90]


def problem_of(nodes: int) -> PartitionProblem:
    graph = chain([1] * nodes, held=[10] * nodes)
    memory = MemoryConstraint.simple(graph, (90, 90), (1, 1, 1, 1), 1)
    return PartitionProblem(graph, 4, placement=PLACEMENT, memory=memory)


def test_a_rank_that_needs_more_than_its_bound_gets_less() -> None:
    problem = problem_of(12)  # nine on rank 0 and three on rank 1: the only numbers that fit
    partition = corrected_cut(problem, solve(problem), missing_bytes)
    assert missing_bytes(partition) == [0, 0]


def test_the_nearest_cut_is_named_where_none_is_found() -> None:
    problem = problem_of(13)
    with pytest.raises(InfeasibleError, match=r"120 B more than .* n3 \(10 B\), n4"):
        corrected_cut(problem, solve(problem), missing_bytes)
