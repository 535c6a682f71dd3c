"""Storages in host memory between forward and backward.

On a CUDA device both copies run beside the computation, on streams of their own:

    compute    ── saves ──────────────────────── backward ─ needs it ──
                    └▶ copy out ▶ event ┐           │ first of its run ▲
                                        └──────────▶ copy all back ─ event

On a CPU, where the host's memory is the device's, they are plain copies, which save nothing and show what would move.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipecompile.graph.encodings import Encoded

__all__ = ["Traffic", "move"]

Run = list[weakref.ref["_Crossed"]]


@dataclass
class Traffic:
    """Bytes that went to the host and that came back, so far."""

    out_bytes: int = 0
    back_bytes: int = 0


def move(flat: Tensor, *, traffic: Traffic, run: Run) -> Encoded:
    """Moves the elements of a storage to the host, counted in `traffic`.

    What goes with one `run` comes back together, the last first, when the first of it is needed; on a CPU each alone.
    """
    if flat.is_cuda:
        return _Crossed(flat, traffic, run)
    return _Copied(flat, traffic)


class _Copied:
    """A copy in the same memory."""

    def __init__(self, flat: Tensor, traffic: Traffic) -> None:
        self._elements, self._traffic = flat.clone(), traffic
        traffic.out_bytes += flat.nbytes

    def restore(self) -> Tensor:
        self._traffic.back_bytes += self._elements.nbytes
        return self._elements.clone()


class _Crossed:
    """A copy in pinned memory, and later one on the way back."""

    def __init__(self, flat: Tensor, traffic: Traffic, run: Run) -> None:
        self._device, self._traffic, self._run = flat.device, traffic, run
        self._returning: tuple[Tensor, torch.cuda.Event] | None = None
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        stream, _ = _streams(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
            self._left = stream.record_event()
        flat.record_stream(stream)  # its memory is given to others only when the copy is done
        traffic.out_bytes += flat.nbytes
        run.append(weakref.ref(self))

    def restore(self) -> Tensor:
        for one in reversed(self._run):
            if (other := one()) is not None:
                other._fetch()
        self._run.clear()
        value, arrived = self._fetch()
        self._returning = None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        value.record_stream(stream)
        return value

    def _fetch(self) -> tuple[Tensor, torch.cuda.Event]:
        if self._returning is None:
            _, stream = _streams(self._device)
            stream.wait_event(self._left)
            with torch.cuda.stream(stream):
                value = self._host.to(self._device, non_blocking=True)
                self._returning = value, stream.record_event()
            self._traffic.back_bytes += value.nbytes
        return self._returning


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For the way out and the way back: the link carries both at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
