"""Cuts of ranks whose memory the search underestimates: those that run several stages, or copies.

Stages that share a rank cannot be priced one by one, and a search leaves copied nodes out, so it
goes by lower bounds of what they hold. A cut that needs more is searched again with caps that are
lower by as much as the bounds were too low. With a cap of 80 GiB, and a rank whose bound was 30 GiB
when it needed 100:

    the next cut may hold 24 GiB there by its bound, since 24 · 100 / 30 = 80
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.size import size_text
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

__all__ = ["corrected_cut"]

SECONDS = 0.5  # of work on each search with lowered caps
CORRECTIONS_MAX = 8
LARGEST_NODES = 3  # that a message names


def corrected_cut(
    problem: PartitionProblem,
    partition: Partition,
    missing_bytes: Callable[[Partition], Sequence[int]],
) -> Partition:
    """Return the partition if it fits, else another one that does.

    `missing_bytes` says, for each rank, how many bytes a cut really needs over the rank's cap, or
    below 0 how many are left. Raise InfeasibleError if no cut is found; it says how near the
    nearest one comes.
    """
    memory = problem.memory
    if memory is None:
        return partition
    tried, caps = [], memory.caps
    for _ in range(CORRECTIONS_MAX):
        missing = missing_bytes(partition)
        if max(missing) <= 0:
            return partition
        tried.append((max(missing), missing, partition))
        caps = _lowered(problem, memory, partition, missing, caps)
        lowered = replace(problem, memory=replace(memory, caps=caps))
        try:
            partition = solve(lowered, seconds=SECONDS, explained=False)
        except InfeasibleError:
            break  # its message would be about the lowered caps
    _, missing, nearest = min(tried, key=lambda each: each[0])
    raise InfeasibleError(_reason(problem, memory, nearest, missing))


def _lowered(
    problem: PartitionProblem,
    memory: MemoryConstraint,
    partition: Partition,
    missing: Sequence[int],
    before: Sequence[int],
) -> tuple[int, ...]:
    """Return the caps on what ranks hold by the bounds, if these stay as much too low as they are
    for this cut. A rank that needs too much gets a lower cap than `before`.
    """
    held = [0] * problem.ranks
    for name, stage in partition.assignment.items():
        held[problem.stage_ranks[stage]] += memory.held_bytes([name], stage)
    caps = []
    for bound, cap, more, last in zip(held, memory.caps, missing, before, strict=True):
        # What is needed is at least the bound, so that the cap of a rank that fits is no lower.
        believed = bound * cap // max(1, cap + more)
        caps.append(max(0, min(believed, last, bound - 1)) if more > 0 else min(cap, believed))
    return tuple(caps)


def _reason(
    problem: PartitionProblem,
    memory: MemoryConstraint,
    partition: Partition,
    missing: Sequence[int],
) -> str:
    """Return what the nearest cut needs, on which rank, and for which nodes."""
    rank = max(range(len(missing)), key=missing.__getitem__)
    stages = [stage for stage, other in enumerate(problem.stage_ranks) if other == rank]
    held = {
        name: memory.held_bytes([name], stage)
        for name, stage in partition.assignment.items()
        if stage in stages
    }
    largest = sorted(held, key=held.__getitem__, reverse=True)[:LARGEST_NODES]
    nodes = ", ".join(f"{name} ({size_text(held[name])})" for name in largest)
    cap = memory.caps[rank]
    return (
        f"no cut was found whose ranks fit their memory: the nearest one needs "
        f"{size_text(cap + missing[rank])} on rank {rank}, {size_text(missing[rank])} more than it "
        f"may hold, in its stages {' and '.join(map(str, stages))}, where the largest nodes are "
        f"{nodes}; whether another one fits is not proven"
    )
