"""The processes that run the stages of a pipeline, and which of them has a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pipecompile.ir.stage_ranks import stage_ranks

__all__ = ["Peers", "group_of_own_stage", "peer_of", "peers_at"]

Peers = Sequence[Sequence[int]]
"""By stage the global ranks that run it: one, or replicas that take its microbatches in turns."""


def peers_at(placement: Sequence[int], global_ranks: Sequence[int]) -> Peers:
    """Return the processes of the stages; `global_ranks` are those of the pipeline's ranks."""
    return [[global_ranks[rank] for rank in ranks] for ranks in stage_ranks(placement)]


def peer_of(peers: Peers, stage: int, microbatch: int | None) -> int:
    """Return the process that runs a microbatch of a stage."""
    # On the ranks (2, 3) microbatch 5 of a stage is rank 3's.
    return peers[stage][(microbatch or 0) % len(peers[stage])]


def group_of_own_stage(peers: Peers) -> dist.ProcessGroup | None:
    """Return the replicas of this process's stage, itself included; None if it has none.

    Every process must call this, since ranks create process groups together.
    """
    group = None
    for replicas in peers:
        if len(replicas) > 1:
            made = dist.new_group(list(replicas))
            group = made if dist.get_rank() in replicas else group
    return group
