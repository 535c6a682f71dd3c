"""The storages of a cost graph by the places of its nodes: where each is made, read, saved and let go."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from pipecompile.ir.encodings import Use
from pipecompile.ir.graph import Content, CostGraph, GradientStorage, Tensor

__all__ = ["LiveRanges", "Storage"]


@dataclass(frozen=True)
class Storage:
    """A storage by the places of nodes: where it is made, who reads it, who saves it for the backward.

    `takers` are pairs of a node that gives it, or a view that travels as it is, and a reader of that.
    `content` says what it holds and `uses`, by saver, what each saved tensor in it is for, where that is known.
    """

    bytes: int
    readers: tuple[int, ...]
    savers: tuple[int, ...]
    content: Content | None = None
    uses: Mapping[int, tuple[Use, ...]] = field(default_factory=dict)
    takers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LiveRanges:
    """The storages of a cost graph, ready for any stage; `optimizer` and `master_weights` are as in a plan's options.

    Nodes are known by their place in the graph's order.
    """

    graph: CostGraph
    optimizer: str | None = None
    master_weights: bool = False

    @cached_property
    def place(self) -> dict[str, int]:
        """The place of each node."""
        return {node.name: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def storages(self) -> dict[int, tuple[Storage, ...]]:
        """By the node that makes them, the storages that a stage may hold; those of the minibatch aside."""
        roots: dict[int, int] = {}
        readers, savers = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        takers = defaultdict[int, set[tuple[int, int]]](set)
        uses = defaultdict[int, dict[int, tuple[Use, ...]]](dict)
        for tensor in self.graph.tensors:
            if tensor.storage is not None:
                producer = self.place[tensor.producer]
                roots[tensor.storage] = min(roots.get(tensor.storage, producer), producer)
                places = set(map(self.place.__getitem__, tensor.consumers))
                readers[tensor.storage] |= places
                takers[tensor.storage] |= {(producer, place) for place in places if tensor.is_dense}
        for index, node in enumerate(self.graph.nodes):
            for storage in node.saved:
                roots.setdefault(storage, index)
                savers[storage].add(index)
            for storage, several in zip(node.saved, node.uses, strict=False):
                uses[storage][index] = several
        made = defaultdict[int, list[Storage]](list)
        for storage, root in roots.items():
            if self.graph.nodes[root].operator != "placeholder":
                read, saved = (tuple(sorted(found[storage])) for found in (readers, savers))
                taken = tuple(sorted(takers[storage]))
                content = self.graph.contents[storage] if self.graph.contents else None
                size, used = self.graph.storages[storage], uses[storage]
                made[root].append(Storage(size, read, saved, content, used, taken))
        return {root: tuple(storages) for root, storages in made.items()}

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """What nodes give, by their names."""
        return {tensor.producer: tensor for tensor in self.graph.tensors}

    @cached_property
    def reading(self) -> Mapping[str, frozenset[int]]:
        """By parameter the nodes that read it."""
        found = defaultdict[str, set[int]](set)
        for place, node in enumerate(self.graph.nodes):
            for name in node.parameters:
                found[name].add(place)
        return {name: frozenset(places) for name, places in found.items()}

    @cached_property
    def viewed(self) -> dict[int, int]:
        """By place what has one reader, a view of all its elements: where that is."""
        pairs = [
            (t, self.values.get(t.consumers[0]))
            for t in self.graph.tensors
            if len(t.consumers) == 1
        ]
        return {
            self.place[tensor.producer]: self.place[view.producer]
            for tensor, view in pairs
            if view is not None and tensor.storage is not None
            if (view.storage, view.gradient_bytes) == (tensor.storage, tensor.gradient_bytes)
        }

    def views_of(self, name: str, places: Collection[int]) -> Iterator[int]:
        """The nodes among `places` that are a view of a node's value, the only reader, a view of that, and so on."""
        place = self.viewed.get(self.place[name], -1)
        while place in places:
            yield place
            place = self.viewed.get(place, -1)

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, int, tuple[int, ...]], ...]:
        """Each tensor that is read, with the places of its producer and its readers."""
        return tuple(
            (
                tensor,
                self.place[tensor.producer],
                tuple(sorted(self.place[name] for name in tensor.consumers)),
            )
            for tensor in self.graph.tensors
            if tensor.consumers
        )

    @cached_property
    def sources(self) -> Mapping[int, Sequence[int]]:
        """By reader, where that was made of which it has a gradient."""
        found = defaultdict[int, list[int]](list)
        for tensor, producer, _ in self.tensors:
            for name in tensor.consumers_with_gradient:
                found[self.place[name]].append(producer)
        return found

    def crossing(self, places: set[int]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """The tensors that go from the nodes at `places` to others, each with all its readers.

        Looked at are those between the first other node and the last of `places`: few in a deep model.
        """
        count = len(self.graph.nodes)
        missing = next((place for place in range(count) if place not in places), count)
        start, stop = (
            bisect_right(self._furthest, missing - 1),
            bisect_right(self._producers, max(places, default=-1)),
        )
        for tensor, producer, readers in self._by_producer[start:stop]:
            if producer in places and not places.issuperset(readers):
                yield tensor, readers

    @cached_property
    def _by_producer(self) -> list[tuple[Tensor, int, tuple[int, ...]]]:
        return sorted(self.tensors, key=lambda row: row[1])

    @cached_property
    def _producers(self) -> list[int]:
        return [producer for _, producer, _ in self._by_producer]

    @cached_property
    def _furthest(self) -> list[int]:
        """How far any tensor up to each one reaches."""
        return list(accumulate((readers[-1] for _, _, readers in self._by_producer), max))

    @cached_property
    def bytes_per_ns(self) -> Fraction:
        """The most that one of the larger nodes reads and writes in a nanosecond; 0 where nothing takes time.

        A node counts with twice the less of both, since some read but a part of what they are given; views do not.
        """
        read, moved = defaultdict[str, int](int), list[tuple[int, int]]()
        known: set[int] = set()
        for tensor in self.graph.tensors:
            node = self.graph.by_name[tensor.producer]
            if tensor.storage is not None and tensor.storage not in known and node.forward_ns:
                moved.append((2 * min(read[node.name], tensor.bytes), node.forward_ns))
            known |= set() if tensor.storage is None else {tensor.storage}
            for name in tensor.consumers:
                read[name] += tensor.bytes
        largest = max((size for size, _ in moved), default=0)
        return max(
            (Fraction(size, ns) for size, ns in moved if 4 * size >= largest), default=Fraction(0)
        )

    @cached_property
    def gradients(self) -> dict[int, tuple[GradientStorage, ...]]:
        """By the node in whose backward they are made, without summands of a parameter's gradient."""
        made = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            if not self._is_summand(gradient):
                made[self.place[gradient.producer]].append(gradient)
        return {place: tuple(rows) for place, rows in made.items()}

    @cached_property
    def given(self) -> dict[tuple[int, int], GradientStorage]:
        """In what lies the gradient that a reader has for a node, by the places of the node and the reader.

        Without those that lie in several, of which a sum is made.
        """
        found = defaultdict[tuple[int, int], list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            for name, reader in gradient.edges:
                found[self.place[name], self.place[reader]].append(gradient)
        return {pair: every[0] for pair, every in found.items() if len(every) == 1}

    def reached(self, gradient: GradientStorage, start: int) -> set[int]:
        """The nodes before the one at `start` whose gradients lie in this."""
        found: set[int] = set()
        waiting = [start]
        while waiting:
            reader = waiting.pop()
            for place in self.sources.get(reader, ()):
                if place not in found and self.given.get((place, reader)) is gradient:
                    found.add(place)
                    waiting.append(place)
        return found

    @cached_property
    def summed(self) -> Mapping[int, Sequence[GradientStorage]]:
        """By reader what others gave before for a node that it reads, and what ends when its own is added to that."""
        found = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            last = self.place[gradient.last]
            others = (name for name, reader in gradient.edges if reader != gradient.last)
            if not set(self.sources.get(last, ())).isdisjoint(map(self.place.__getitem__, others)):
                found[last].append(gradient)
        return found

    @cached_property
    def capturing(self) -> Mapping[int, Sequence[GradientStorage]]:
        """By node what is captured there."""
        found = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            for name in gradient.captured_at:
                found[self.place[name]].append(gradient)
        return found

    def _is_summand(self, gradient: GradientStorage) -> bool:
        """Whether it goes from one reader of a parameter to another: it counts with the parameter."""
        by_name = self.graph.by_name
        if gradient.producer == gradient.last:
            return False
        shared = set(by_name[gradient.producer].parameters) & set(by_name[gradient.last].parameters)
        return any(gradient.bytes == self.graph.parameter_by_name[name].bytes for name in shared)
