"""How much memory ranks lack at the least, by lower bounds of what nodes hold.

It takes milliseconds: a problem without a cut is explained, and others are ruled out, by few
searches.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem

__all__ = ["missing_bytes", "missing_or_spare_bytes"]


def missing_bytes(problem: PartitionProblem) -> int:
    """Return the least number of bytes by which all caps must grow for a cut to be possible.

    Stages are runs of the graph's own order. If stages share ranks, all nodes are compared with all
    ranks.
    """
    memory = problem.memory
    if memory is None:
        return 0
    if problem.ranks != problem.k:
        return _missing_in_sum(problem, memory)
    return 0 if _can_fill(problem, memory, 0) else _least_growth(problem, memory, 0)


def missing_or_spare_bytes(problem: PartitionProblem) -> int:
    """Return the same for stages alone on their ranks, but below 0 by how much all caps may
    shrink.
    """
    memory = problem.memory
    assert memory is not None
    return _least_growth(problem, memory, -max(memory.caps))


def _least_growth(problem: PartitionProblem, memory: MemoryConstraint, too_few: int) -> int:
    """Return the least growth of all caps with which all nodes find place; `too_few` is not."""
    enough = too_few + 1
    # Steps of 1, 2, 4, 8 …: from 0 on 1, 3, 7, 15 are tried until one is
    # enough, and the half-open range that is left is searched by halves: two
    # steps for each bit of the answer, and no guess of how large it might be.
    while not _can_fill(problem, memory, enough):
        too_few, enough = enough, enough + 2 * (enough - too_few)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _can_fill(problem, memory, middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _missing_in_sum(problem: PartitionProblem, memory: MemoryConstraint) -> int:
    names = [node.name for node in problem.graph.nodes]
    needed = sum(memory.resident[name] + memory.optimizer.get(name, 0) for name in names)
    needed += min(memory.in_flight) * sum(memory.saved[name] for name in names)
    missing = max(0, needed - sum(memory.caps))
    return -(-missing // problem.ranks)


def _can_fill(problem: PartitionProblem, memory: MemoryConstraint, more: int) -> bool:
    """Return whether all nodes find place if each stage takes as many as its cap allows.

    No other runs would do if these do not: a stage that takes fewer leaves more to the next ones.
    """
    resident, saved = _sums(problem, memory.resident), _sums(problem, memory.saved)
    optimizer = _sums(problem, memory.optimizer)
    start, count = 0, len(problem.graph.nodes)
    for in_flight, rank in zip(memory.in_flight, problem.stage_ranks, strict=True):
        # `held[n]` has the first n nodes as this stage would hold them, so a stage of nodes m …
        # n − 1 holds held[n] − held[m]: the last n for which that fits is found by one search.
        held = resident + optimizer + in_flight * saved
        room = held[start] + memory.caps[rank] + more
        start = max(start, int(np.searchsorted(held, room, side="right")) - 1)
    return start == count


def _sums(problem: PartitionProblem, sizes: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the bytes of the first n nodes, for each n from none to all."""
    each = [0, *(sizes.get(node.name, 0) for node in problem.graph.nodes)]
    return np.cumsum(np.array(each, dtype=np.int64))
