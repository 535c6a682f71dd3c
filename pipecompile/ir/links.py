"""How ranks are connected: bandwidth and latency, and how long messages occupy ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations
from typing import Literal, NamedTuple

import msgspec

from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["FREE", "Hop", "Link", "Links", "links_of_pairs", "slowest"]


class Link(Value, frozen=True, kw_only=True):
    """A connection: a transfer takes ceil(bytes × 10⁹ / bandwidth) + latency ns.

    Without a bandwidth, a transfer of any size takes the latency.
    """

    bandwidth_bytes_per_s: Positive | None = None
    latency_ns: NonNegative = 0

    def transfer_ns(self, size: int) -> int:
        """Return the ns that `size` bytes take; zero bytes are not sent."""
        if not size or self.bandwidth_bytes_per_s is None:
            return self.latency_ns if size else 0
        # 1 MiB at 16 GB/s with 5 µs of latency takes 65,536 + 5,000 ns.
        # Rounded up in integers: floats would lose nanoseconds of large messages.
        return -(-size * 10**9 // self.bandwidth_bytes_per_s) + self.latency_ns


def slowest(links: Iterable[Link]) -> Link:
    """Return a link with the least bandwidth and the longest latency of `links`."""
    every = list(links)
    # Perhaps no link that exists: the bandwidth of one and the latency of another. So no message
    # takes longer over any of them, whatever its size.
    rates = [link.bandwidth_bytes_per_s for link in every]
    return Link(
        bandwidth_bytes_per_s=min((rate for rate in rates if rate is not None), default=None),
        latency_ns=max(link.latency_ns for link in every),
    )


class Hop(NamedTuple):
    """The links across a boundary: values go forward, their gradients go back."""

    forward: Link
    backward: Link

    def transfer_ns(self, size: int, gradient: int) -> int:
        """Return the ns that a value and its gradient take, given the bytes of each."""
        return self.forward.transfer_ns(size) + self.backward.transfer_ns(gradient)


class Links(Value, frozen=True, kw_only=True):
    """Bandwidth and latency of every message, from the start of its send to the end of its receive.

    Either is one value for all pairs of ranks, or a matrix from each rank (row) to each other one
    (column); its diagonal is not used, as nothing is sent within a rank. The ranks of several
    replicas follow one another, replica by replica; messages of all pipelines take as long as in
    the slowest one. A bandwidth of None means that any size takes no time. Of the time of a
    message, its sender cannot compute for `sending`, and its receiver for `receiving`.
    """

    schema: Literal["pipecompile/links/1"] = "pipecompile/links/1"
    bandwidth_bytes_per_s: Positive | tuple[tuple[Positive | None, ...], ...] | None
    latency_ns: NonNegative | tuple[tuple[NonNegative, ...], ...]
    sending: Link = Link()
    receiving: Link = Link()

    def __post_init__(self) -> None:
        # Both matrices are for the same ranks, so all their sides are equal.
        sides = {side for matrix in self._matrices for side in (len(matrix), *map(len, matrix))}
        if len(sides) > 1 or 0 in sides:
            raise ValueError(
                f"matrices must be square and of one size, but have sides {sorted(sides)}"
            )

    @staticmethod
    def of(link: Link) -> Links:
        """Return links that are the same between any two of any number of ranks."""
        return Links(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_ns=link.latency_ns)

    @property
    def _matrices(self) -> list[tuple[tuple[int | None, ...], ...]]:
        return [
            value
            for value in (self.bandwidth_bytes_per_s, self.latency_ns)
            if isinstance(value, tuple)
        ]

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if the links are for any number."""
        return len(self._matrices[0]) if self._matrices else None

    def fits(self, ranks: int) -> bool:
        """Return whether these links are for that many ranks."""
        return self.ranks in (None, ranks)

    def link(self, source: int, destination: int) -> Link:
        """Return what connects one rank to another; within a rank, a link that takes no time."""
        if source == destination:
            return Link()
        rate, delay = self.bandwidth_bytes_per_s, self.latency_ns
        return Link(
            bandwidth_bytes_per_s=rate[source][destination] if isinstance(rate, tuple) else rate,
            latency_ns=delay[source][destination] if isinstance(delay, tuple) else delay,
        )

    def hop(self, source: int, destination: int) -> Hop:
        """Return the links there and back."""
        # The way back is another row of the matrix, and may be slower.
        return Hop(self.link(source, destination), self.link(destination, source))

    def among(self, ranks: int) -> Links:
        """Return the links of a pipeline of `ranks`: of each pair the slowest one in any replica.

        Replicas step together, so a pipeline waits for the one whose boundary lies between nodes.
        """
        if self.ranks is None or self.ranks == ranks:
            return self
        # Rank r of replica i is row i · ranks + r. Of two replicas of two ranks, 0 1 and 2 3, the
        # link from 0 to 1 is the slower one of those from 0 to 1 and from 2 to 3.
        first_ranks = range(0, self.ranks - ranks + 1, ranks)

        def slowest_from_to(one: int, other: int) -> Link:
            return slowest(self.link(first + one, first + other) for first in first_ranks)

        table = [[slowest_from_to(one, other) for other in range(ranks)] for one in range(ranks)]
        return self._with_overheads(links_of_pairs(table))

    def renumbered(self, order: Sequence[int]) -> Links:
        """Return the links among the same ranks, of which number i is the former `order[i]`."""
        if self.ranks is None:
            return self
        table = [[self.link(one, other) for other in order] for one in order]
        return self._with_overheads(links_of_pairs(table))

    def _with_overheads(self, links: Links) -> Links:
        """Return other links with what messages take of the compute of these ranks."""
        return msgspec.structs.replace(links, sending=self.sending, receiving=self.receiving)

    def between_replicas(self, rank: int, ranks: int) -> Link:
        """Return the slowest link around the ring of all replicas of `rank`, one of `ranks`.

        Rank r of replica i is row i · `ranks` + r. Links for any number of ranks are all alike.
        """
        # Of two replicas of two ranks, rank 1 has the ring 1 → 3 → 1.
        return (
            self.link(0, 1) if self.ranks is None else self.around(range(rank, self.ranks, ranks))
        )

    def around_replicas(self, ranks: Sequence[int], pipeline: int) -> Link:
        """Return the slowest link around the ring of the replicas of a stage on `ranks` of a
        pipeline: these, or if it is one alone the same rank of all pipelines.
        """
        if len(ranks) > 1:
            return self.around(ranks)
        return self.between_replicas(ranks[0], pipeline)

    def around(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link around the ring of `ranks`."""
        return slowest(self.link(one, other) for one, other in pairwise([*ranks, ranks[0]]))

    def pairs(self) -> Iterator[tuple[int, int, Link]]:
        """Yield source, destination and link of all pairs; two ranks stand for any number."""
        for source, destination in permutations(range(self.ranks or 2), 2):
            yield source, destination, self.link(source, destination)

    @property
    def one(self) -> Link | None:
        """The link between any two ranks; None if there are different ones."""
        distinct = {link for _, _, link in self.pairs()} or {Link()}
        return distinct.pop() if len(distinct) == 1 else None

    def transfer_ns(self, source: int, destination: int, size: int) -> int:
        """Return the ns from the start of a send to the end of its receive; zero within a rank."""
        return self.link(source, destination).transfer_ns(size)

    def under_way_ns(self, source: int, destination: int, size: int) -> int:
        """Return the ns of that in which neither rank is occupied."""
        # Measured overheads may add up to more than the measured time of a message.
        busy = self.sending.transfer_ns(size) + self.receiving.transfer_ns(size)
        return max(0, self.transfer_ns(source, destination, size) - busy)


def links_of_pairs(table: Sequence[Sequence[Link]]) -> Links:
    """Return links with a link from each rank (row) to each other one (column)."""
    return Links(
        bandwidth_bytes_per_s=tuple(
            tuple(each.bandwidth_bytes_per_s for each in row) for row in table
        ),
        latency_ns=tuple(tuple(each.latency_ns for each in row) for row in table),
    )


FREE = Links.of(Link())
