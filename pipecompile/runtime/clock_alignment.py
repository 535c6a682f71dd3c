"""Clocks of several ranks: what to add to the time of one to get that of another.

Rank 0 sends a ping to each other rank, which answers with the time on its own clock:

    rank 0   t0 ──▶ ·············· t2         if both ways take equally long, the other clock shows
    rank 1   ······ t1 ──▶                    t1 when this one shows (t0 + t2) / 2

The error is at most half of the trip (t2 − t0), however unequal the two ways are. The fastest of
several trips counts. Over gloo on one machine the error is a few tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist

__all__ = ["ClockOffset", "clock_offsets"]

TRIPS = 20


@dataclass(frozen=True)
class ClockOffset:
    """How far the clock of a rank is ahead of rank 0's, and how wrong that may be."""

    ns: int = 0
    error_ns: int = 0

    @property
    def may_be_zero(self) -> bool:
        """Whether both ranks may have read the same clock, as processes of one machine do."""
        return abs(self.ns) <= self.error_ns


def clock_offsets(
    ranks: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
) -> list[ClockOffset]:
    """Return on the first of the global `ranks` the offset of each rank's clock; [] elsewhere.

    All of `ranks` call this together; they are the processes of `group`.
    """
    dist.barrier(group)
    own = dist.get_rank()
    if own != ranks[0]:
        for _ in range(TRIPS):
            _exchange(dist.irecv, 0, ranks[0], device, group)
            _exchange(dist.isend, perf_counter_ns(), ranks[0], device, group)
        return []
    return [ClockOffset(), *(_offset(peer, device, group) for peer in ranks[1:])]


def _offset(peer: int, device: torch.device, group: dist.ProcessGroup | None) -> ClockOffset:
    trips = []
    for _ in range(TRIPS):
        sent = perf_counter_ns()
        _exchange(dist.isend, 0, peer, device, group)
        answer = _exchange(dist.irecv, 0, peer, device, group)
        received = perf_counter_ns()
        trips.append((received - sent, answer - (sent + received) // 2))
    # Sent at 100, answered with 1120, received at 140: offset 1120 − 120 = 1000, wrong by 20 at
    # most, which is when one of the two ways took no time.
    trip, offset = min(trips)
    return ClockOffset(offset, -(-trip // 2))


def _exchange(
    operation: object, value: int, peer: int, device: torch.device, group: dist.ProcessGroup | None
) -> int:
    """Send `value` or receive one; return the value."""
    message = torch.tensor([value], dtype=torch.int64, device=device)
    # As a batch, because NCCL would make a new communicator for a single message.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group)]):  # type: ignore[arg-type]
        work.wait()
    return int(message.item())
