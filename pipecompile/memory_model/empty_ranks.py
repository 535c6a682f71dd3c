"""What ranks take before they hold anything, whatever is cut, and what their caps then leave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.stage_ranks import stages_on
from pipecompile.memory_model.allocator import ALLOCATORS

__all__ = ["empty_rank_bytes", "room_of_ranks"]


def empty_rank_bytes(
    placement: Sequence[int], ranks: int, allocator: AllocatorName
) -> tuple[int, ...]:
    """Return what the allocator and the communication library take on each rank, for any model."""
    return tuple(
        ALLOCATORS[allocator].padded(0, 0, peers) for peers in _least_peers(tuple(placement), ranks)
    )


def room_of_ranks(
    caps: Sequence[int], placement: Sequence[int], allocator: AllocatorName
) -> tuple[int, ...]:
    """Return what the storages of each rank may take if all of them stay, the most of any; below 0
    if not even an empty rank fits.
    """
    peers = _least_peers(tuple(placement), len(caps))
    return tuple(map(ALLOCATORS[allocator].most_persistent, caps, peers))


@lru_cache(maxsize=256)
def _least_peers(placement: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return for each rank a number of ranks that it exchanges tensors with, replicas left out.

    As `neighbour_ranks` does, it counts one for each stage before or behind its own.
    """
    counts = []
    for rank in range(ranks):
        own = set(stages_on(placement, rank))
        near = {stage + step for stage in own for step in (-1, 1)}
        counts.append(len(near & set(range(len(placement))) - own))
    return tuple(counts)
