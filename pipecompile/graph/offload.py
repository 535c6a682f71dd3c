"""Offloading: storages that lie in host memory between forward and backward.

On a CUDA device both copies run beside the computation, on streams of their own:

    compute    ── saves ──────────────────────── backward ─ needs it ──
                    └▶ copy out ▶ event ┐           │ first of group ▲
                                        └──────────▶ copy all back ─ event

On a CPU, where the host's memory is the device's, they are plain copies. These save nothing; they
show which bytes would move.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipecompile.graph.encodings import EncodedElements

__all__ = ["OffloadGroup", "Traffic", "offload_to_host"]

OffloadGroup = list[weakref.ref["_PinnedCopy"]]
"""Storages that return together, in the order in which they left."""


@dataclass
class Traffic:
    """Bytes that were copied to the host and back, so far."""

    out_bytes: int = 0
    back_bytes: int = 0


def offload_to_host(flat: Tensor, *, traffic: Traffic, group: OffloadGroup) -> EncodedElements:
    """Copy the elements of a storage to the host and count them in `traffic`.

    On a CUDA device the storages of one `group` return together when the first of them is needed;
    the one that left last returns first, since a backward goes in this order. On a CPU each storage
    returns alone.
    """
    if flat.is_cuda:
        return _PinnedCopy(flat, traffic, group)
    return _HostCopy(flat, traffic)


class _HostCopy:
    """A copy of elements that are in the host's memory already."""

    def __init__(self, flat: Tensor, traffic: Traffic) -> None:
        self._elements, self._traffic = flat.clone(), traffic
        traffic.out_bytes += flat.nbytes

    def restore(self) -> Tensor:
        self._traffic.back_bytes += self._elements.nbytes
        return self._elements.clone()


class _PinnedCopy:
    """A copy in pinned memory of the host; on the way back also one on the device."""

    def __init__(self, flat: Tensor, traffic: Traffic, group: OffloadGroup) -> None:
        self._device, self._traffic, self._group = flat.device, traffic, group
        self._returning: tuple[Tensor, torch.cuda.Event] | None = None
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        stream, _ = _streams(flat.device)
        # The elements may still be being computed.
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
            self._copied_out = stream.record_event()
        # The allocator may reuse the memory only after the copy is done.
        flat.record_stream(stream)
        traffic.out_bytes += flat.nbytes
        group.append(weakref.ref(self))

    def restore(self) -> Tensor:
        # Copies back are issued for the whole group, so that they run beside the backward of the
        # nodes that need the first storage.
        for reference in reversed(self._group):
            if (member := reference()) is not None:
                member._copy_back()
        self._group.clear()
        value, copied_back = self._copy_back()
        # The caller owns the copy on the device; it is freed after its use.
        self._returning = None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied_back)
        # It was allocated on the stream of copies back, but the backward's stream reads it.
        value.record_stream(stream)
        return value

    def _copy_back(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return the copy on the device and the event of its completion; issue it at most once."""
        if self._returning is None:
            _, stream = _streams(self._device)
            stream.wait_event(self._copied_out)
            with torch.cuda.stream(stream):
                value = self._host.to(self._device, non_blocking=True)
                self._returning = value, stream.record_event()
            self._traffic.back_bytes += value.nbytes
        return self._returning


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return a stream for each direction: the link carries both at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
