"""What torch's CPU allocator gave and took back: the independent truth of predictions of memory."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity

__all__ = ["allocations", "events", "highest"]

SETTLING_SECONDS = 0.2  # events at the very begin and end of a profile are dropped


@contextmanager
def events() -> Iterator[dict[str, list[int]]]:
    """Bytes given, and taken back (negative), in order: all under "", those within a `record_function` under its name.

    Filled at the end of the block.
    """
    found: dict[str, list[int]] = {}
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)
        yield found
        time.sleep(SETTLING_SECONDS)
    rows = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [row for row in rows if row.name() == "[memory]"]
    times, sizes = [row.start_ns() for row in memory], [row.nbytes() for row in memory]
    for row in rows:
        if row.name() != "[memory]":
            first, last = (
                bisect(times, row.start_ns() + length) for length in (0, row.duration_ns())
            )
            found[row.name()] = sizes[first:last]
    found[""] = sizes


def allocations(step: Callable[[], Any]) -> list[int]:
    """What the allocator gave and took back (negative) during `step`, in order."""
    with events() as found:
        step()
    return found[""]


def highest(sizes: list[int]) -> int:
    """The most bytes that lived, above those that lived before."""
    return max(accumulate(sizes, initial=0))
