"""NCCL in loopback: a rank that is alone sends to itself.

No link between GPUs is measured by that. It shows that sends and receives run, what they cost at
least, and how much memory NCCL takes outside of PyTorch's allocator, which a plan's bound assumes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.rows import Row, needs_cuda
from pipecompile.cost_models.clock import Clock
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.runtime.probe import fit_link

__all__ = ["message_cases"]

SIZES = (64, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes
REPEATS = 20


def message_cases(bench: Bench) -> Iterator[Case]:
    """Yield the one case."""
    yield Case("loopback", lambda: _rows(bench))


def _rows(bench: Bench) -> Iterator[Row]:
    if not bench.is_cuda or not dist.is_nccl_available():
        yield needs_cuda("loopback")
        return
    torch.cuda.set_device(bench.device)
    before = _taken_elsewhere(bench.device)
    dist.init_process_group(
        "nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=bench.device
    )
    try:
        yield from _loopback(bench, before)
    finally:
        dist.destroy_process_group()


def _loopback(bench: Bench, before: int) -> Iterator[Row]:
    """Yield what NCCL has taken since `before`, and the times of messages by size."""
    message = torch.arange(64, dtype=torch.uint8, device=bench.device)
    arrived = torch.zeros_like(message)
    _exchange(message, arrived)
    torch.cuda.synchronize(bench.device)
    assert torch.equal(message, arrived), "what arrived is not what was sent"
    taken = _taken_elsewhere(bench.device) - before
    note = "communicator and one exchange; a send to oneself may need no buffers of a peer"
    yield Row("NCCL's memory", ALLOCATORS["cuda"].peer_bytes, taken, "bytes", "assumed", note)
    times = {size: _exchange_ns(bench, size) for size in SIZES}
    link = fit_link(times)
    for size, ns in times.items():
        yield Row(f"a message of {size} bytes to itself", None, ns, "ns")
    yield Row("latency", None, link.latency_ns, "ns")
    if link.bandwidth_bytes_per_s is not None:
        yield Row("bandwidth", None, link.bandwidth_bytes_per_s / 1e9, "GB/s")


def _taken_elsewhere(device: torch.device) -> int:
    """Return the bytes of the device that are taken, but not by PyTorch's allocator."""
    gc.collect()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _exchange(message: Tensor, arrived: Tensor) -> None:
    # A send to oneself has to be in one group with its receive; alone it would wait for ever.
    operations = [dist.P2POp(dist.isend, message, 0), dist.P2POp(dist.irecv, arrived, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _exchange_ns(bench: Bench, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    arrived, clock, times = torch.empty_like(message), Clock(bench.device), list[int]()
    for _ in range(1 + REPEATS):
        start = clock.mark()
        _exchange(message, arrived)
        end = clock.mark()
        clock.wait()
        times.append(clock.between_ns(start, end))
    return median(times[1:])
