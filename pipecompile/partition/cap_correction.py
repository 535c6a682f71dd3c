"""Cuts of ranks whose memory the search underestimates: those that run several stages, or copies.

Stages that share a rank cannot be priced one by one, and a search leaves copied nodes out, so it
goes by lower bounds of what they hold. A cut that needs more is searched again with lower caps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.size import size_text
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

__all__ = ["corrected_cut"]

SECONDS = 0.5  # of work on each search with lowered caps
CORRECTIONS_MAX = 5


def corrected_cut(
    problem: PartitionProblem,
    partition: Partition,
    excess_bytes: Callable[[Partition], Sequence[int]],
) -> Partition:
    """Return the partition if it fits, else another one that does.

    `excess_bytes` says, for each rank, how many bytes a cut really needs over the rank's cap. Each
    cap is lowered by its excess and the cut searched again, a few times. Raise InfeasibleError if
    that does not help.
    """
    memory = problem.memory
    if memory is None:
        return partition
    caps = memory.caps
    for _ in range(CORRECTIONS_MAX):
        excess = excess_bytes(partition)
        if not any(excess):
            return partition
        caps = tuple(max(0, cap - over) for cap, over in zip(caps, excess, strict=True))
        lowered = replace(problem, memory=replace(memory, caps=caps))
        try:
            partition = solve(lowered, seconds=SECONDS, explained=False)
        except InfeasibleError:
            break  # its message would be about the lowered caps
    rank = max(range(len(excess)), key=excess.__getitem__)
    raise InfeasibleError(
        f"no cut was found whose ranks fit their memory: the last one tried needs "
        f"{size_text(excess[rank])} too much on rank {rank}, which holds "
        f"{problem.k // problem.ranks} stages; whether another one fits is not proven"
    )
