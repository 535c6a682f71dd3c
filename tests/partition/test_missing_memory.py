"""How much memory is missing by lower bounds, against all cuts of a chain."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.missing_memory import missing_bytes
from pipecompile.partition.problem import PartitionProblem

SIZES = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=3, max_size=7)


def problem(sizes: list[tuple[int, int, int]], caps: tuple[int, ...]) -> PartitionProblem:
    names = [f"n{index}" for index in range(len(sizes))]
    resident, saved, optimizer = (
        dict(zip(names, column, strict=True)) for column in zip(*sizes, strict=True)
    )
    k = len(caps)
    memory = MemoryConstraint(caps, tuple(range(k, 0, -1)), resident, saved, optimizer=optimizer)
    nodes = tuple(
        Node(name=name, forward_ns=1, backward_ns=1, parameter_bytes=0, saved_bytes=0, group=None)
        for name in names
    )
    return PartitionProblem(CostGraph(nodes=nodes, tensors=()), k, memory=memory)


def least_over_all_cuts(sizes: list[tuple[int, int, int]], caps: tuple[int, ...]) -> int:
    """Return the least that every cap must grow by; stages may be empty."""
    k, count = len(caps), len(sizes)
    missing = []
    for cuts in combinations(range(count + k - 1), k - 1):
        ends = [0, *(cut - index for index, cut in enumerate(cuts)), count]
        held = [
            sum(r + o + (k - stage) * s for r, s, o in sizes[start:stop])
            for stage, (start, stop) in enumerate(pairwise(ends))
        ]
        missing.append(max(0, *(need - cap for need, cap in zip(held, caps, strict=True))))
    return min(missing)


@given(SIZES, st.lists(st.integers(0, 40), min_size=2, max_size=3).map(tuple))
def test_it_is_the_least_of_all_cuts(
    sizes: list[tuple[int, int, int]], caps: tuple[int, ...]
) -> None:
    assert missing_bytes(problem(sizes, caps)) == least_over_all_cuts(sizes, caps)
