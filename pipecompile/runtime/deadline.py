"""The time that a step over ranks may take: what it waits for ends with it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

__all__ = ["SETTLING_SECONDS", "Deadline", "OverdueError"]

SETTLING_SECONDS = 1.0
"""Enough beats (`heartbeat.py`) to tell a dead rank from one that lives."""

_Options = TypeVar("_Options", AllreduceOptions, AllgatherOptions, BroadcastOptions)


class OverdueError(Exception):
    """The step has taken longer than it may, though no wait of this rank has failed."""


class Deadline:
    """The time that a step may take; without `seconds` it may take for ever.

    Collectives that it starts end soon after it by themselves. Else a thread of gloo would wait in
    them for its own half an hour, and a process cannot end before its threads do.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def is_over(self, by: float = 0.0) -> bool:
        """Return whether the step has taken `by` seconds longer than it may."""
        return self._end is not None and time.monotonic() > self._end + by

    def wait(self, work: dist.Work) -> None:
        """Wait for `work` as long as time is left."""
        if self._end is None:
            # Not as long as a timeout of years: torch then keeps the process group's own.
            work.wait()
        else:
            work.wait(timedelta(seconds=self._seconds_left()))

    def all_reduce(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """Reduce `tensor` over `group` in place, as long as time is left."""
        self.wait(self.start_all_reduce(tensor, group, operation))

    def start_all_reduce(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> dist.Work:
        """Begin to reduce `tensor` over `group` in place."""
        options = AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return _processes(group).allreduce([tensor], self._limit(options))

    def broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
        """Fill `tensor` with that of the rank `source` of `group`, as long as time is left."""
        options = BroadcastOptions()
        options.rootRank = source
        self.wait(_processes(group).broadcast([tensor], self._limit(options)))

    def start_all_gather(
        self, parts: list[Tensor], own: Tensor, group: dist.ProcessGroup | None
    ) -> dist.Work:
        """Begin to fill `parts` with what each rank of `group` has as `own`."""
        return _processes(group).allgather([parts], [own], self._limit(AllgatherOptions()))

    def wait_for(self, group: dist.ProcessGroup | None) -> None:
        """Wait as long as time is left until all ranks of `group` are here.

        For exchanges of objects, which end only with the timeout of the process group.
        """
        if self._end is not None:
            device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
            # The default dtype may be another one on each rank.
            self.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group)
            # A rank that comes late finds that the others were here, but they may have left since.
            if self.is_over():
                raise OverdueError

    def _seconds_left(self) -> float:
        assert self._end is not None
        return max(0.01, self._end - time.monotonic())

    def _limit(self, options: _Options) -> _Options:
        """Return `options` of a collective that ends soon after the deadline."""
        if self._end is not None:
            # Later than the verdict: NCCL's own watchdog would end the process before it.
            options.timeout = timedelta(seconds=self._seconds_left() + 3 * SETTLING_SECONDS)
        return options


def _processes(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    assert dist.group.WORLD is not None
    return dist.group.WORLD
