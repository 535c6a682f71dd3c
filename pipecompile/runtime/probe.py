"""The links between ranks, measured with messages. Called by `api/links.py`.

Messages are sent as torch's pipeline runtime sends them: each by an `isend` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean, quantiles
from time import perf_counter_ns
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.ir.links import Link, Links
from pipecompile.runtime import world

__all__ = ["fit_link", "measure_links"]

SIZES = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes; the first is taken as an empty message
REPEATS, WARM_UPS = 40, 3
SIDE = 128  # of matrices whose products keep a rank busy, for about 0.1 ms each

T = TypeVar("T")


def fit_link(times_ns: Mapping[int, float]) -> Link:
    """Return the link that `times_ns` (size in bytes → ns) show.

    The latency is the time of the smallest size, and the bandwidth the inverse slope of the line
    fitted by least squares. It is None if larger messages take no longer. Times of 1000 ns for 0
    bytes and 2000 ns for 1000 bytes have a slope of 1 ns a byte: 1 GB/s.
    """
    mean_size, mean_time = fmean(times_ns), fmean(times_ns.values())
    covariance = sum((s - mean_size) * (t - mean_time) for s, t in times_ns.items())
    slope = covariance / sum((s - mean_size) ** 2 for s in times_ns)
    latency = max(0, round(times_ns[min(times_ns)]))
    bandwidth = max(1, round(1e9 / slope)) if slope > 0 else None
    return Link(bandwidth_bytes_per_s=bandwidth, latency_ns=latency)


def measure_links() -> Links:
    """Return the links between all ranks of the default process group.

    All ranks call this together and get the same answer. Pairs are measured one after the other.
    The time that a message takes from the compute of its ranks is measured between the first two
    ranks. On GPUs it is taken as zero, since messages have streams of their own there.
    """
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    transfers = _between(permutations(range(world.size()), 2), device, _transfer)
    occupations = {} if gpu else _between([(0, 1)], device, _occupation)
    links: dict[tuple[int, int], Link] = {}
    for transfers_of_rank in world.gather(transfers):
        for pair, link in transfers_of_rank.items():
            if link is not None:  # only the sender of a pair has one
                links[pair] = link
    # Rank 0 sends and rank 1 receives, so these are the sender's and the receiver's, in this order.
    sending_receiving = [
        link for of_rank in world.gather(occupations) for link in of_rank.values()
    ] or [Link(), Link()]
    ranks = range(world.size())
    rows = [[links.get((a, b), Link()) for b in ranks] for a in ranks]
    return Links(
        bandwidth_bytes_per_s=tuple(
            tuple(link.bandwidth_bytes_per_s for link in row) for row in rows
        ),
        latency_ns=tuple(tuple(link.latency_ns for link in row) for row in rows),
        sending=sending_receiving[0],
        receiving=sending_receiving[1],
    )


@dataclass(frozen=True)
class _RankPair:
    """This rank and its `peer`: one of them sends, the other receives."""

    peer: int
    sends: bool
    device: torch.device

    def message(self, size: int) -> Tensor:
        """Return a message of `size` bytes."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def start(self, message: Tensor, *, back: bool = False) -> dist.Work:
        """Start to send or to receive the message; with `back`, in the other direction."""
        sends = self.sends != back
        work = dist.isend(message, self.peer) if sends else dist.irecv(message, self.peer)
        assert work is not None
        return work

    def transfer(self, message: Tensor, *, back: bool = False) -> None:
        """Send or receive the message and wait until that is done."""
        self.start(message, back=back).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _between(
    pairs: Iterable[tuple[int, int]], device: torch.device, measure: Callable[[_RankPair], T]
) -> dict[tuple[int, int], T]:
    """Return what `measure` returns for the pairs that this rank belongs to.

    Pairs are (sender, receiver). Ranks that do not belong to a pair wait at a barrier meanwhile.
    """
    results = {}
    for source, destination in pairs:
        dist.barrier()
        if world.rank() in (source, destination):
            sends = world.rank() == source
            peer = destination if sends else source
            results[source, destination] = measure(_RankPair(peer, sends, device))
    dist.barrier()
    return results


def _fastest(pair: _RankPair, time_ns: Callable[[_RankPair, Tensor], int]) -> dict[int, float]:
    """Return by size the time in ns that the fastest tenth of the messages take at most.

    The fastest count, because other work of the machine only adds time. Sizes take turns, so that a
    burst of other work does not slow down only one of them, and so that caches are cold. A smaller
    message is taken to be at least as fast as a larger one.
    """
    messages = {size: pair.message(size) for size in SIZES}
    times: dict[int, list[int]] = {size: [] for size in SIZES}
    for turn in range(WARM_UPS + REPEATS):
        for size, message in messages.items():
            time = time_ns(pair, message)
            if turn >= WARM_UPS:
                times[size].append(time)
    deciles = {size: quantiles(samples, n=10)[0] for size, samples in times.items()}
    return {size: min(time for other, time in deciles.items() if other >= size) for size in SIZES}


def _transfer(pair: _RankPair) -> Link | None:
    """Return the link, on the sender: it times a message there and a smallest one back."""
    trips = _fastest(pair, _round_trip_ns)
    if not pair.sends:
        return None
    # Only one clock is read. A trip of two smallest messages takes 20 µs, so the way back takes
    # 10; a trip with 1 MiB that takes 270 µs then has 260 for the way there.
    back = trips[SIZES[0]] / 2
    return fit_link({size: trip - back for size, trip in trips.items()})


def _round_trip_ns(pair: _RankPair, message: Tensor) -> int:
    answer = pair.message(SIZES[0])
    start = perf_counter_ns()
    pair.transfer(message)
    pair.transfer(answer, back=True)
    return perf_counter_ns() - start


def _occupation(pair: _RankPair) -> Link:
    """Return how long a message occupies this rank, as a link.

    A send copies what it can at once, so its time grows with the size. A receive copies nothing.
    """
    times = _fastest(pair, _call_ns)
    return fit_link(times) if pair.sends else Link(latency_ns=round(min(times.values())))


def _call_ns(pair: _RankPair, message: Tensor) -> int:
    """Return the time in the calls for a message that travels beside compute.

    sender      mm   isend ─┐ mm mm … mm  wait
    receiver    irecv ──────┤ mm mm … mm  wait      the timed calls are isend or irecv, and wait
    """
    matrix = torch.ones(SIDE, SIDE)
    _meet(pair)
    if pair.sends:
        torch.mm(matrix, matrix)  # meanwhile the receiver begins to wait for the message
    start = perf_counter_ns()
    work = pair.start(message)
    started = perf_counter_ns()
    # So many products take longer than the message, which has arrived when they end.
    for _ in range(16 + message.nbytes // SIZES[1]):
        torch.mm(matrix, matrix)
    waited = perf_counter_ns()
    work.wait()
    return perf_counter_ns() - waited + started - start


def _meet(pair: _RankPair) -> None:
    """Let both ranks continue from here at the same time."""
    answer = pair.message(1)
    pair.transfer(answer)
    pair.transfer(answer, back=True)
