"""The clock of a device, and how often a run is timed until its time is steady.

Used by the measured cost model and by the timing of stages.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

__all__ = ["Clock", "TimeSample", "device_name", "steady_sample"]

STEADY = 0.03  # the largest change of the median from round to round that counts as steady
RUNS, LONG_RUNS = 5, 3  # in a round
ROUNDS = 5
LONG_NS = 50_000_000


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Clock:
    """Marks moments in the queue of work of `device`, without waiting for the work.

    On a CPU a mark is wall time. On a GPU it is an event in the current stream. If several pieces
    of work are queued in a row, the time of each is that of its kernels or that of launching them,
    whichever is longer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Return a mark at this moment of the queue."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        # In the stream that the work is queued in: another stream would not wait for it.
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Wait until all queued work has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def between_ns(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two marks; on a GPU, call `wait` before."""
        if self.device.type == "cuda":
            milliseconds: float = start.elapsed_time(end)
            return round(milliseconds * 1e6)
        return int(end - start)


@dataclass(frozen=True, slots=True)
class TimeSample:
    """The times of some runs in ns: their median, and the distance between their quartiles."""

    median_ns: int
    spread_ns: int

    @staticmethod
    def of(times: list[int]) -> TimeSample:
        """Return the sample of these times."""
        # Inclusive: the quartiles of five times are the second and the fourth one.
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return TimeSample(round(middle), round(high - low))


def steady_sample(run: Callable[[int], list[int]]) -> TimeSample:
    """Return the times of a round of runs, once these are steady.

    `run(count)` returns the times of `count` runs. A round is steady if its median differs by at
    most 3 % from that of the round before: caches, allocators and clock rates need some load until
    they are as in a long run. After five rounds the last one counts.

        times    900 | 200 200 200 200 200 | 110 … | 101 … | 100 …
                 warm-up     round 1        round 2  round 3  round 4: within 3 % of 101

    If a run takes longer than 50 ms, one round of three runs follows the warm-up.
    """
    (first,) = run(1)  # warms up, and tells whether runs are long
    if first > LONG_NS:
        return TimeSample.of(run(LONG_RUNS))
    times = run(RUNS)
    for _ in range(ROUNDS - 1):
        before, times = median(times), run(RUNS)
        if abs(median(times) - before) <= STEADY * before:
            break
    return TimeSample.of(times)
