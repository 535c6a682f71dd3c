"""The allocations of torch's CPU allocator, with which predictions of memory are compared."""

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

SETTLING_SECONDS = 0.2  # Events at the very begin and end of a profile are dropped.


@contextmanager
def events() -> Iterator[dict[str, list[int]]]:
    """Yield a mapping that holds the bytes of all allocations, in order, when the block has ended.

    Freed bytes are negative. All are under the key "", those within a `record_function` under its
    name.
    """
    by_name: dict[str, list[int]] = {}
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)
        yield by_name
        time.sleep(SETTLING_SECONDS)
    rows = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [row for row in rows if row.name() == "[memory]"]
    times, sizes = [row.start_ns() for row in memory], [row.nbytes() for row in memory]
    for row in rows:
        if row.name() != "[memory]":
            first, last = (
                bisect(times, row.start_ns() + length) for length in (0, row.duration_ns())
            )
            by_name[row.name()] = sizes[first:last]
    by_name[""] = sizes


def allocations(step: Callable[[], Any]) -> list[int]:
    """Return the bytes allocated and freed (negative) during `step`, in order."""
    with events() as by_name:
        step()
    return by_name[""]


def highest(sizes: list[int]) -> int:
    """Return the most bytes that were live at once, beyond those that were live before."""
    return max(accumulate(sizes, initial=0))
