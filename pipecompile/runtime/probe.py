"""How long messages take between ranks, sent as torch's pipeline runtime sends them: each by an isend of its own."""

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

__all__ = ["fitted", "probe"]

SIZES = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes; the first stands for none
REPEATS, WARM_UPS = 40, 3
SIDE = 128  # of the matrices whose products keep a rank busy: about a tenth of a millisecond each

T = TypeVar("T")


def fitted(times_ns: Mapping[int, float]) -> Link:
    """Latency, the time of the smallest size, and bandwidth, by least squares; none if size makes no difference."""
    size, time = fmean(times_ns), fmean(times_ns.values())
    slope = sum((s - size) * (t - time) for s, t in times_ns.items()) / sum(
        (s - size) ** 2 for s in times_ns
    )
    latency = max(0, round(times_ns[min(times_ns)]))
    return Link(
        bandwidth_bytes_per_s=max(1, round(1e9 / slope)) if slope > 0 else None, latency_ns=latency
    )


def probe() -> Links:
    """The links between all ranks of the default process group, which all call it and get the same.

    One pair is measured after another. What a message takes of the ranks themselves is measured between the first
    two; on GPUs it is taken as nothing, since messages travel there on streams beside the compute.
    """
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    transfers = _between(permutations(range(world.size()), 2), device, _transfer)
    own = {} if gpu else _between([(0, 1)], device, _taken)
    found = {
        pair: link
        for part in world.gathered(transfers)
        for pair, link in part.items()
        if link is not None
    }
    taken = [link for part in world.gathered(own) for link in part.values()] or [Link(), Link()]
    ranks = range(world.size())
    rows = [[found.get((a, b), Link()) for b in ranks] for a in ranks]
    return Links(
        bandwidth_bytes_per_s=tuple(
            tuple(link.bandwidth_bytes_per_s for link in row) for row in rows
        ),
        latency_ns=tuple(tuple(link.latency_ns for link in row) for row in rows),
        sending=taken[0],
        receiving=taken[1],
    )


@dataclass(frozen=True)
class _RankPair:
    """This rank and another: one sends, the other receives."""

    peer: int
    sends: bool
    device: torch.device

    def message(self, size: int) -> Tensor:
        """Of `size` bytes."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def start(self, message: Tensor, *, back: bool = False) -> dist.Work:
        """Sends the message, or receives it."""
        work = (
            dist.isend(message, self.peer) if self.sends != back else dist.irecv(message, self.peer)
        )
        assert work is not None
        return work

    def pass_on(self, message: Tensor, *, back: bool = False) -> None:
        """Until it has left, or arrived."""
        self.start(message, back=back).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _between(
    pairs: Iterable[tuple[int, int]], device: torch.device, measure: Callable[[_RankPair], T]
) -> dict[tuple[int, int], T]:
    """What `measure` finds for the pairs that this rank belongs to, as sender or as receiver; the others wait."""
    found = {}
    for source, destination in pairs:
        dist.barrier()
        if world.rank() in (source, destination):
            sends = world.rank() == source
            found[source, destination] = measure(
                _RankPair(destination if sends else source, sends, device)
            )
    dist.barrier()
    return found


def _fastest(line: _RankPair, time_ns: Callable[[_RankPair, Tensor], int]) -> dict[int, float]:
    """By size the time that a tenth of the messages stay under: what else the machine does only adds to it.

    Sizes take turns, so that a burst of other work does not hit one of them alone, and so that caches are cold. A
    smaller message takes no longer than a larger one.
    """
    messages = {size: line.message(size) for size in SIZES}
    times: dict[int, list[int]] = {size: [] for size in SIZES}
    for turn in range(WARM_UPS + REPEATS):
        for size, message in messages.items():
            time = time_ns(line, message)
            if turn >= WARM_UPS:
                times[size].append(time)
    tenths = {size: quantiles(found, n=10)[0] for size, found in times.items()}
    return {size: min(time for other, time in tenths.items() if other >= size) for size in SIZES}


def _transfer(line: _RankPair) -> Link | None:
    """The link, on the rank that sends: a message goes there, and one of the smallest size comes back."""
    trips = _fastest(line, _round_trip_ns)
    back = trips[SIZES[0]] / 2
    return fitted({size: trip - back for size, trip in trips.items()}) if line.sends else None


def _round_trip_ns(line: _RankPair, message: Tensor) -> int:
    answer = line.message(SIZES[0])
    start = perf_counter_ns()
    line.pass_on(message)
    line.pass_on(answer, back=True)
    return perf_counter_ns() - start


def _taken(line: _RankPair) -> Link:
    """What a message takes of its rank's own time: a send copies what it can at once, a receive waits for no copy."""
    times = _fastest(line, _called_ns)
    return fitted(times) if line.sends else Link(latency_ns=round(min(times.values())))


def _called_ns(line: _RankPair, message: Tensor) -> int:
    """The time in calls for a message on its way beside compute; it starts when its receiver waits for it."""
    matrix = torch.ones(SIDE, SIDE)
    _meet(line)
    if line.sends:
        torch.mm(matrix, matrix)
    start = perf_counter_ns()
    work = line.start(message)
    started = perf_counter_ns()
    for _ in range(16 + message.nbytes // SIZES[1]):  # longer than the message takes
        torch.mm(matrix, matrix)
    waited = perf_counter_ns()
    work.wait()
    return perf_counter_ns() - waited + started - start


def _meet(line: _RankPair) -> None:
    """Both go on from here together."""
    answer = line.message(1)
    line.pass_on(answer)
    line.pass_on(answer, back=True)
