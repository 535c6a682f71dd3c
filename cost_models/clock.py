"""A clock of a device, wall time on a CPU and events in the stream of a GPU, and how often a work is timed with it."""

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

STEADY = 0.03  # by how much the median of a round may differ from that of the round before
RUNS, LONG_RUNS = 5, 3  # of a round
ROUNDS = 5
LONG_NS = 50_000_000


def device_name(device: torch.device) -> str:
    """What the device is: the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


class Clock:
    """Marks moments among the work that is queued on `device`, without waiting for it.

    On a GPU the time between two marks is that between two events of the current stream: of work queued in a row, each
    piece takes the longer of its kernels and their launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """This moment of the queue."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Until all that is queued has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def between_ns(self, start: Any, end: Any) -> int:
        """The nanoseconds between two marks; on a GPU after `wait`."""
        return (
            round(start.elapsed_time(end) * 1e6) if self.device.type == "cuda" else int(end - start)
        )


@dataclass(frozen=True, slots=True)
class TimeSample:
    """The times of some runs: their median, and the distance between their quartiles, in ns."""

    median_ns: int
    spread_ns: int

    @staticmethod
    def of(times: list[int]) -> TimeSample:
        """From the time of each run."""
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return TimeSample(round(middle), round(high - low))


def steady_sample(run: Callable[[int], list[int]]) -> TimeSample:
    """Of `run(count)`, which times `count` runs, the round whose median is within 3 % of that of the round before.

    Caches, allocators and clock rates need a while under load before they are what a long run sees. After five rounds
    the last one counts; of runs that take longer than 50 ms the first one, after a run to warm up.
    """
    (first,) = run(1)
    if first > LONG_NS:
        return TimeSample.of(run(LONG_RUNS))
    times = run(RUNS)
    for _ in range(ROUNDS - 1):
        before, times = median(times), run(RUNS)
        if abs(median(times) - before) <= STEADY * before:
            break
    return TimeSample.of(times)
