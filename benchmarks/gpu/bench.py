"""The bench that every part is given: a device, a meter of its memory, and sizes of models.

What is not CUDA's own runs on a CPU too, so that tests run the parts with tiny models:

    part ──▶ Bench ──▶ Meter: CudaMeter here, a CPU's in tests/benchmarks/test_gpu.py
                 └───▶ Clock (cost_models/clock.py): CUDA events, or wall time on a CPU
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from benchmarks.gpu.models import Scale
from pipecompile.cost_models.device import named_devices

__all__ = ["Bench", "CudaMeter", "Meter", "Usage", "device_costs", "known_device", "warm_up"]


class Usage(NamedTuple):
    """What a run took of a device's memory, in bytes above what was held before it.

    `peak` is the most that the allocator had given out, in whole blocks, and `requested` the most
    that was asked for. `kept` is what was still given out when it ended, its result included.
    `reserved` is the most that the allocator had taken from the device for that.
    """

    peak: int
    requested: int
    kept: int
    reserved: int


class Meter(Protocol):
    """Measures the memory that a run takes."""

    def usage(self, run: Callable[[], object]) -> Usage:
        """Return what `run` took, which must leave no garbage of its own before."""

    def runs_within(self, run: Callable[[], object], size: int) -> bool:
        """Return whether `run` ends if it may take so many bytes beside what is held."""


@dataclass(frozen=True)
class CudaMeter:
    """Reads the statistics of PyTorch's allocator for CUDA.

    The peak is that of `torch.cuda.max_memory_allocated` after `reset_peak_memory_stats`. It counts
    blocks: multiples of 512 bytes, and up to 1 MiB more for those above 1 MiB, whose rest is not
    split off. `requested` is without that. `reserved` counts segments: 2 MiB for small blocks,
    20 MiB and more for large ones. With PYTORCH_ALLOC_CONF=expandable_segments:True there is one
    growing segment for each pool, and `reserved` is close to `peak`; the result's file says which
    setting was on. What CUDA itself and NCCL take is in none of these.
    """

    device: torch.device

    def usage(self, run: Callable[[], object]) -> Usage:
        """Return what `run` took; the cache of freed blocks is emptied before."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_stats(self.device)
        result = run()
        torch.cuda.synchronize(self.device)
        after = torch.cuda.memory_stats(self.device)
        del result

        def rise(kind: str, at: str) -> int:
            # Backends other than the native one have no figure of what was requested.
            first = before.get(f"{kind}_bytes.all.current", 0)
            return int(after.get(f"{kind}_bytes.all.{at}", 0) - first)

        return Usage(
            peak=rise("allocated", "peak"),
            requested=rise("requested", "peak"),
            kept=rise("allocated", "current"),
            reserved=rise("reserved", "peak"),
        )

    def runs_within(self, run: Callable[[], object], size: int) -> bool:
        """Return whether `run` ends if the allocator may take so many bytes more of the device.

        It gives back what is cached before it gives up. So fragments count, and what is cached
        without need does not.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(self.device).total_memory
        allowed = torch.cuda.memory_reserved(self.device) + size
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / whole), self.device)
        try:
            run()
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        return True


@dataclass(frozen=True)
class Bench:
    """What a part measures with.

    `costs` are `roofline:DEVICE` of this device. `scale` is the size of models, and `folder` is
    for files of this run.
    """

    device: torch.device
    meter: Meter
    costs: str
    scale: Scale
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


def known_device(name: str, memory_bytes: int) -> str | None:
    """Return which device of devices.json has this name, as the driver spells it; None if none.

    "NVIDIA H100 80GB HBM3" is h100. "NVIDIA H100 PCIe" is none, since it is slower than the one
    that is listed, and "NVIDIA A100-SXM4-40GB" has half of the memory.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if {"pcie", "nvl"} & set(words):
        return None
    words += [left + right for left, right in pairwise(words)]
    for device in named_devices().values():
        # Drivers count in other units than datasheets, and keep some memory for themselves.
        if device.name in words and abs(memory_bytes / device.memory_bytes - 1) < 0.1:
            return device.name
    return None


def device_costs(device: torch.device, calibrated: Path) -> str:
    """Return `roofline:DEVICE` for a GPU: by its name, or else by the file `calibrated`.

    The part `operators` writes that file.
    """
    properties = torch.cuda.get_device_properties(device)
    return f"roofline:{known_device(properties.name, properties.total_memory) or calibrated}"


def warm_up(device: torch.device) -> None:
    """Run a product and a convolution, forward and backward, in each type that models have.

    The libraries behind them allocate workspaces once, in each thread, and keep them.
    """
    for dtype in (torch.float32, torch.bfloat16):
        product = nn.Linear(256, 256, device=device, dtype=dtype)
        product(torch.ones(256, 256, device=device, dtype=dtype)).sum().backward()
        convolution = nn.Conv2d(8, 8, 3, device=device, dtype=dtype)
        convolution(torch.ones(1, 8, 16, 16, device=device, dtype=dtype)).sum().backward()
