"""The storages of a cost graph by the places of its nodes: who produces, reads and saves each.

Everything here is independent of the cut, so one `LiveRanges` serves all stages that a planner asks
about. A node's place is its index in the graph's order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd

from pipecompile.ir.encodings import Use
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import Content, CostGraph, GradientStorage, Tensor
from pipecompile.ir.plan import Options, ShardLevel
from pipecompile.ir.stage_ranks import stage_ranks

__all__ = ["LiveRanges", "Storage"]

SHARED = 32  # graphs whose ranges are remembered: that of a plan, and those of its copied nodes


@dataclass(frozen=True)
class Storage:
    """A storage by the places of nodes: who reads it, and who saves it for the backward.

    `content` says what it holds, and `uses` what each tensor that a node saves of it is for, by the
    place of the node; both only where that is known. `dense_edges` are pairs (producer, reader) of
    tensors that lie in it without gaps, and so can be sent as they are.
    """

    bytes: int
    readers: tuple[int, ...]
    savers: tuple[int, ...]
    content: Content | None = None
    uses: Mapping[int, tuple[Use, ...]] = field(default_factory=dict)
    dense_edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LiveRanges:
    """The storages of a cost graph, ready for any stage.

    The other fields are as in a plan's options, but `replicas` may be those of one stage: its ranks
    then exchange tensors with `more_peers` than one for each neighbouring stage, and sum each tied
    parameter once over all that hold it (`ties_once`). `footprints` remembers those of stages, by
    what `footprint_of` was given.
    """

    graph: CostGraph
    optimizer: str | None = None
    master_weights: bool = False
    replicas: int = 1
    shard: ShardLevel | None = None
    kv_tokens: int = 0
    post_validation: bool = False
    optimizer_on_host: bool = False
    more_peers: int = 0
    ties_once: bool = False
    footprints: dict[Hashable, Footprint] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(graph: CostGraph, options: Options) -> LiveRanges:
        """Return the storages of a graph for plans with these options."""
        ranges = LiveRanges(
            graph,
            options.optimizer,
            options.master_weights,
            options.replicas,
            options.shard,
            options.kv_tokens or 0,
            options.post_validation,
            options.optimizer_on_host,
        )
        return _remembered(ranges)

    def of_stage(self, stage: int, placement: Sequence[int]) -> LiveRanges:
        """Return the same for a stage that has replicas of its own, or a neighbour that has."""
        counts = list(map(len, stage_ranks(placement)))
        if max(counts) == 1:
            return self
        own, beside = counts[stage], (*counts[:stage][-1:], *counts[stage + 1 :][:1])
        # Microbatches go around both stages: of 4 ranks beside it, one of 2 meets every second.
        met = sum(count // gcd(own, count) for count in beside)
        peers = met - len(beside)
        ranges = replace(self, replicas=own, more_peers=peers, ties_once=True, footprints={})
        return _remembered(ranges)

    @property
    def divides_gradients(self) -> bool:
        """Whether each backward leaves only this rank's part of the gradients."""
        return self.shard in ("gradients", "parameters")

    @property
    def gathers_in_actions(self) -> bool:
        """Whether parameters are whole only while an action of their stage runs."""
        return self.shard == "parameters"

    @cached_property
    def place(self) -> dict[str, int]:
        """The place of each node."""
        return {node.name: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def storages(self) -> dict[int, tuple[Storage, ...]]:
        """The storages that a stage may hold, by the place of their producer.

        A storage is produced by the first node whose value lies in it, or else by the first node
        that saves it (a mask, say). Inputs of the minibatch are buffers, and not among these.
        """
        # For linear (place 0), a view of it (1) and relu (2), which saves its own output:
        #
        #     storage   tensors        producer   readers   savers
        #     7         linear, view   0          1, 2
        #     8         relu           2                    2
        producers: dict[int, int] = {}
        readers, savers = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        dense_edges = defaultdict[int, set[tuple[int, int]]](set)
        uses = defaultdict[int, dict[int, tuple[Use, ...]]](dict)
        for tensor in self.graph.tensors:
            if tensor.storage is not None:
                producer = self.place[tensor.producer]
                # Views come after what they are views of, so the first tensor is the producer's.
                producers[tensor.storage] = min(producers.get(tensor.storage, producer), producer)
                places = {self.place[name] for name in tensor.consumers}
                readers[tensor.storage] |= places
                if tensor.is_dense:
                    dense_edges[tensor.storage] |= {(producer, place) for place in places}
        for place, node in enumerate(self.graph.nodes):
            # What no node returns, such as a mask, has no producer yet: its first saver makes it.
            for storage in node.saved:
                producers.setdefault(storage, place)
                savers[storage].add(place)
            # `uses` may be empty, where a cost graph does not know them.
            for storage, storage_uses in zip(node.saved, node.uses, strict=False):
                uses[storage][place] = storage_uses
        by_producer = defaultdict[int, list[Storage]](list)
        for storage, producer in producers.items():
            if self.graph.nodes[producer].operator != "placeholder":
                by_producer[producer].append(
                    Storage(
                        self.graph.storages[storage],
                        tuple(sorted(readers[storage])),
                        tuple(sorted(savers[storage])),
                        self.graph.contents[storage] if self.graph.contents else None,
                        uses[storage],
                        tuple(sorted(dense_edges[storage])),
                    )
                )
        return {producer: tuple(storages) for producer, storages in by_producer.items()}

    @cached_property
    def tensor_of(self) -> dict[str, Tensor]:
        """The value of each node that has one, by name."""
        return {tensor.producer: tensor for tensor in self.graph.tensors}

    @cached_property
    def parameter_readers(self) -> Mapping[str, frozenset[int]]:
        """The places of the nodes that read each parameter."""
        readers = defaultdict[str, set[int]](set)
        for place, node in enumerate(self.graph.nodes):
            for name in node.parameters:
                readers[name].add(place)
        return {name: frozenset(places) for name, places in readers.items()}

    @cached_property
    def sole_view(self) -> dict[int, int]:
        """The place of the view, for nodes whose only reader is a view of all elements."""
        views: dict[int, int] = {}
        # The gradient of such a view has all elements of the node's own: it is its gradient, seen
        # in another shape, and the backward of the view makes nothing.
        for tensor in self.graph.tensors:
            if len(tensor.consumers) != 1 or tensor.storage is None:
                continue
            view = self.tensor_of.get(tensor.consumers[0])
            if view is None or view.storage != tensor.storage:
                continue
            # With fewer gradient bytes it is a view of a part only.
            if view.gradient_bytes == tensor.gradient_bytes:
                views[self.place[tensor.producer]] = self.place[view.producer]
        return views

    def views_of(self, name: str, places: Collection[int]) -> Iterator[int]:
        """Yield a node's sole view, the sole view of that, and so on, while in `places`."""
        place = self.sole_view.get(self.place[name], -1)
        while place in places:
            yield place
            place = self.sole_view.get(place, -1)

    @cached_property
    def read_tensors(self) -> tuple[tuple[Tensor, int, tuple[int, ...]], ...]:
        """Each tensor that is read, with the places of its producer and, in order, its readers."""
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
    def gradient_receivers(self) -> Mapping[int, Sequence[int]]:
        """The producers for which the backward of each reader makes a gradient."""
        receivers = defaultdict[int, list[int]](list)
        for tensor, producer, _ in self.read_tensors:
            for name in tensor.consumers_with_gradient:
                receivers[self.place[name]].append(producer)
        return receivers

    def crossing(self, places: set[int]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the tensors that go from the nodes at `places` to others, each with all readers.

        In a deep model `places` are nearly always the first nodes of the graph, and only few
        tensors can cross. Let `missing` be the first place that is not among them:

            places      0 1 2 3 . 5 . . .      missing = 4, last = 5
            skipped     tensors up to which nothing is read at place 4 or later
            examined    those after these, with producers up to place 5
        """
        count = len(self.graph.nodes)
        missing = next((place for place in range(count) if place not in places), count)
        # Tensors before `start` are only read before place `missing`: by nodes of `places`.
        start = bisect_right(self._furthest_reader, missing - 1)
        stop = bisect_right(self._sorted_producers, max(places, default=-1))
        for tensor, producer, readers in self._by_producer[start:stop]:
            if producer in places and not places.issuperset(readers):
                yield tensor, readers

    @cached_property
    def _by_producer(self) -> list[tuple[Tensor, int, tuple[int, ...]]]:
        return sorted(self.read_tensors, key=lambda row: row[1])

    @cached_property
    def _sorted_producers(self) -> list[int]:
        return [producer for _, producer, _ in self._by_producer]

    @cached_property
    def _furthest_reader(self) -> list[int]:
        """The last reader of any tensor up to each one: ascending, so that it can be bisected."""
        return list(accumulate((readers[-1] for _, _, readers in self._by_producer), max))

    @cached_property
    def bytes_per_ns(self) -> Fraction:
        """The highest rate at which a large node reads and writes; 0 where nothing takes time.

        A node counts with twice the smaller of bytes read and bytes written, since some nodes read
        only a part of their inputs. Views move nothing. Nodes below a quarter of the largest are
        left out: their times are mostly launches.
        """
        read, moved = defaultdict[str, int](int), list[tuple[int, int]]()
        known: set[int] = set()
        for tensor in self.graph.tensors:
            node = self.graph.by_name[tensor.producer]
            # A tensor in a storage that is known is a view, or written in place: no new bytes.
            if tensor.storage is not None and tensor.storage not in known and node.forward_ns:
                moved.append((2 * min(read[node.name], tensor.bytes), node.forward_ns))
            if tensor.storage is not None:
                known.add(tensor.storage)
            for name in tensor.consumers:
                read[name] += tensor.bytes
        # Of (80 bytes, 10 ns), (60, 5) and (4, 1) the last is too small; the rate is 60 / 5 = 12.
        largest = max((size for size, _ in moved), default=0)
        rates = (Fraction(size, ns) for size, ns in moved if 4 * size >= largest)
        return max(rates, default=Fraction(0))

    @cached_property
    def gradients(self) -> dict[int, tuple[GradientStorage, ...]]:
        """The gradients that each place makes, without the summands of a parameter's gradient."""
        by_producer = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            if not self._is_parameter_summand(gradient):
                by_producer[self.place[gradient.producer]].append(gradient)
        return {place: tuple(gradients) for place, gradients in by_producer.items()}

    @cached_property
    def gradient_on_edge(self) -> dict[tuple[int, int], GradientStorage]:
        """The one storage in which the gradient of each edge (producer, reader) lies.

        Edges whose gradient lies in several storages, which are summed, are left out.
        """
        storages = defaultdict[tuple[int, int], list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            for name, reader in gradient.edges:
                storages[self.place[name], self.place[reader]].append(gradient)
        return {edge: several[0] for edge, several in storages.items() if len(several) == 1}

    def places_sharing(self, gradient: GradientStorage, start: int) -> set[int]:
        """Return the nodes before the one at `start` whose gradients lie in `gradient`.

        A backward that only makes views (of an addition, a reshape) leaves the gradient where it
        is, so one storage may serve a whole chain of nodes.
        """
        # For relu(a + b) with relu at `start`: the gradient of the addition is that of a and of b
        # too. The walk goes from relu to the addition, and from there to a and to b.
        sharing: set[int] = set()
        waiting = [start]
        while waiting:
            reader = waiting.pop()
            for place in self.gradient_receivers.get(reader, ()):
                if place not in sharing and self.gradient_on_edge.get((place, reader)) is gradient:
                    sharing.add(place)
                    waiting.append(place)
        return sharing

    @cached_property
    def summands(self) -> Mapping[int, Sequence[GradientStorage]]:
        """The gradients that end at each reader, where its own gradient is added to them.

        They hold what other readers gave before for a node that it reads.
        """
        # A value that is read at places 3 and 5: the backward of 5 comes first, and what it gives
        # waits until 3 adds its own. So this storage ends at 3 and is a summand there.
        summands = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            last = self.place[gradient.last]
            others = {
                self.place[name] for name, reader in gradient.edges if reader != gradient.last
            }
            if not others.isdisjoint(self.gradient_receivers.get(last, ())):
                summands[last].append(gradient)
        return summands

    @cached_property
    def capturable(self) -> Mapping[int, Sequence[GradientStorage]]:
        """The gradients that an input backward may hold for the weight backward, by place."""
        capturable = defaultdict[int, list[GradientStorage]](list)
        for gradient in self.graph.gradients:
            for name in gradient.captured_at:
                capturable[self.place[name]].append(gradient)
        return capturable

    def _is_parameter_summand(self, gradient: GradientStorage) -> bool:
        """Return whether it goes from one reader of a parameter to another; then that counts it."""
        if gradient.producer == gradient.last:
            return False
        first, last = (
            self.graph.by_name[name].parameters for name in (gradient.producer, gradient.last)
        )
        shared = set(first) & set(last)
        return any(gradient.bytes == self.graph.parameter_by_name[name].bytes for name in shared)


@lru_cache(maxsize=SHARED)
def _remembered(ranges: LiveRanges) -> LiveRanges:
    """Return the ranges that were made first of those that are equal, with their footprints.

    A plan compares many orders, policies and objectives, each with a planner of its own.
    """
    return ranges
