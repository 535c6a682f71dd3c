"""The values of one stage: what its nodes store, who needs it again, and what regions hold of it.

A region is a run of nodes that are recomputed before their backwards. Regions may contain others;
they never overlap otherwise. Of a region's storages the forward keeps nothing: they exist from the
recompute on. What the region reads from outside is kept instead:

    place      0     1     2     3     4
    region           └─ region 0 ─┘
    stored     s0    s1    s2    s3    s4
               │ kept, as region 0 reads it: its holder is place 1, the region's first node
                     s1, s2, s3 exist from region 0's recompute to the backwards that read them

stage.py follows these values through the actions of a stage, and recompute_problem.py describes
them to the searches for regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from pipecompile.ir.graph import Tensor
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.encodings import EncodedPlaces, StorageEncoding, storage_encodings
from pipecompile.memory_model.gradients import GradientFlow
from pipecompile.memory_model.live_ranges import LiveRanges, Storage
from pipecompile.memory_model.subgraph import StageSubgraph

__all__ = ["BOUND_WORKSPACE", "Counting", "StageValues", "StoredValue"]

BOUND_WORKSPACE = 1 + Fraction(
    1, 10
)  # how much larger a bound takes the workspace of kernels to be


class StoredValue(NamedTuple):
    """A storage that the node at `place` makes; −1 if it is there before the first node.

    The backwards of the nodes at `holders`, in order, need what the forward kept: savers outside
    regions, and the first nodes of regions that read it and save anything (regions that save
    nothing are never recomputed). `region_copies` are what regions that it lies in make of it when
    they are recomputed, from the outermost on. `encodings` stand for it where savers encode it.
    `last_forward_use` is where a forward frees it if nobody holds it.
    """

    place: int
    storage: Storage
    holders: tuple[int, ...]
    region_copies: tuple[RegionCopy, ...]
    encodings: tuple[StorageEncoding, ...]
    last_forward_use: int


class RegionCopy(NamedTuple):
    """A storage that a recompute of `region` (an index) makes anew.

    The region holds it until the backward of the node at `place` is done; or, if it
    `ends_before_backward`, only until a region within, which reads it, was recomputed before that
    backward.
    """

    region: int
    place: int
    ends_before_backward: bool


class Counting(NamedTuple):
    """How bytes are counted, as expected or for a bound.

    The workspace of kernels is multiplied by `workspace_factor`, and `size_of` is what an allocator
    takes for one storage.
    """

    workspace_factor: Fraction | int
    size_of: Callable[[int], int]

    def needed(self, rise: int, workspace: int) -> int:
        """Return what a node that makes `rise` bytes live needs with the workspace of its kernels.

        A node that makes nothing live (a view) runs no kernels, so its workspace does not count.
        """
        if not rise:
            return 0
        if not workspace:
            return rise
        factor = self.workspace_factor
        return rise + -(-workspace * factor.numerator // factor.denominator)


class StageValues(StageSubgraph):
    """The values of one stage with `regions` and encoded runs.

    An encoded run is a run of nodes whose saved tensors are encoded. It has no nodes in common with
    regions.
    """

    def __init__(
        self,
        ranges: LiveRanges,
        before: set[int],
        nodes: Sequence[int],
        regions: Sequence[Sequence[int]] = (),
        encoded_runs: Sequence[EncodedPlaces] = (),
    ) -> None:
        super().__init__(ranges, before, nodes)
        self.regions = regions
        self.enclosing = _enclosing_regions(nodes, regions)
        self.run_at = {place: run for run in encoded_runs for place in run.places}
        self.allocator = ALLOCATORS[ranges.graph.allocator]
        self.gradients = GradientFlow(self)
        self.stored = [
            self._stored(place, storage)
            for place in nodes
            for storage in ranges.storages.get(place, ())
        ]

    @property
    def all_stored(self) -> Iterator[StoredValue]:
        """The values that nodes store, and the copies with gaps of what arrived."""
        yield from self.stored
        yield from self.strided_copies

    # -- what later stages get

    def is_sent(self, storage: Storage) -> bool:
        """Return whether a message to a later stage lies in the storage itself."""
        return bool(self.sent_names(storage))

    def sent_names(self, storage: Storage) -> tuple[str, ...]:
        """Return the tensors that lie in the storage and are sent as they are."""
        producers = {
            producer
            for producer, reader in storage.dense_edges
            if producer in self.inside and self.is_later(reader)
        }
        return tuple(self.graph.nodes[producer].name for producer in sorted(producers))

    def is_sent_as_copy(self, storage: Storage) -> bool:
        """Return whether later stages only get copies of its views."""
        return any(map(self.is_later, storage.readers)) and not self.is_sent(storage)

    def relayed_as(self, tensor: Tensor) -> Iterator[str]:
        """Yield under which names an input is sent on: as it arrived, or as a view of it."""
        # A copy is memory of this stage; only what lies in the received message is relayed.
        copied = {sent.producer for sent in self.sent_copies}
        in_message = tensor.storage is not None and not tensor.strided_copy_bytes
        for sent in self.leaving:
            is_view = in_message and sent.is_dense and sent.storage == tensor.storage
            if sent.producer not in copied and (is_view or sent.producer == tensor.producer):
                yield sent.producer

    @cached_property
    def sent_copies(self) -> list[Tensor]:
        """The tensors that are sent as copies, since they have gaps or repeat elements."""
        read = {tensor.producer for tensor in self.read_inputs}
        copies = []
        for tensor in self.leaving:
            is_own_view = not tensor.is_dense and self.ranges.place[tensor.producer] in self.inside
            is_read_input = tensor.producer in read and tensor.gradient_bytes
            if is_own_view or (is_read_input and tensor.strided_copy_bytes):
                copies.append(tensor)
        return copies

    # -- what is stored

    def _stored(self, place: int, storage: Storage) -> StoredValue:
        """Return the storage with the nodes of this stage that need it after the forward."""
        savers = [saver for saver in storage.savers if saver in self.inside]
        # Only outermost regions count: what inner ones read is held by the outer recompute.
        own_region = self.enclosing.get(place, ())[:1]
        reading_regions = {
            self.enclosing[user][0]
            for user in (*storage.readers, *savers)
            if self.enclosing.get(user)
        }.difference(own_region)
        plain_savers = [saver for saver in savers if not self.enclosing[saver]]
        encodings, unencoded = storage_encodings(
            storage, plain_savers, self.run_at, self.graph.allocator
        )
        holders = [*unencoded]
        for region in reading_regions:
            if self.recomputed_at(region) is not None:
                holders.append(self.regions[region][0])
        waiting = (encoding.encoded_at for encoding in encodings if encoding.waits_for_end)
        last_use = max(self.last_read(place, storage), *waiting, place)
        if any(map(self.is_later, storage.readers)):
            last_use = self.nodes[-1]  # copies for later stages are made when all nodes are done
        copies = tuple(self._region_copies(place, storage))
        return StoredValue(place, storage, tuple(sorted(holders)), copies, encodings, last_use)

    @cached_property
    def strided_copies(self) -> list[StoredValue]:
        """Inputs that arrive contiguous and are laid out with gaps again, before the first node."""
        return [
            self._stored(-1, self._strided_copy(tensor))
            for tensor in self.read_inputs
            if tensor.strided_copy_bytes
        ]

    def _strided_copy(self, tensor: Tensor) -> Storage:
        """Return the copy of an input with gaps: read by its readers, and by those of its views."""
        readers = {self.ranges.place[name] for name in tensor.consumers} - self.before
        dense_edges: list[tuple[int, int]] = []
        # In the order of nodes, so that the readers of a view are known when a view of it comes.
        for place in self.nodes:
            if place not in readers:
                continue
            view = self.ranges.tensor_of.get(self.graph.nodes[place].name)
            if view is not None and view.storage == tensor.storage is not None:
                places = {self.ranges.place[name] for name in view.consumers}
                readers |= places
                if view.is_dense:
                    dense_edges += [(place, reader) for reader in places]
        savers = [
            place
            for place in readers & self.inside
            if tensor.storage in self.graph.nodes[place].saved
        ]
        return Storage(
            tensor.strided_copy_bytes,
            tuple(sorted(readers)),
            tuple(sorted(savers)),
            dense_edges=tuple(dense_edges),
        )

    def _region_copies(self, place: int, storage: Storage) -> Iterator[RegionCopy]:
        """Yield what each region around `place` holds of the storage once it is recomputed.

        A region holds it for its own nodes that save it, and for the regions directly within it
        that read it. It frees it with the first of these, as backwards run from the last node to
        the first.
        """
        around = self.enclosing.get(place, ())
        if not around:
            return
        users = {user for user in (*storage.readers, *storage.savers) if user in self.inside}
        for depth in range(1, len(around) + 1):
            beside = [u for u in users if self._common_depth(around, self.enclosing[u]) == depth]
            ends = [(user, False) for user in beside if user in storage.savers]
            inner = {region for user in beside for region in self.enclosing[user][depth:]}
            triggers = map(self.recomputed_at, inner)
            ends += [(trigger, True) for trigger in triggers if trigger is not None]
            if ends:
                yield RegionCopy(around[depth - 1], *min(ends))

    def last_read(self, place: int, storage: Storage) -> int:
        """Return until when a forward has what is made at `place` and not held.

        Regions and encoded runs have their inputs until they end.
        """
        around = self.enclosing.get(place, ())
        ends = [*storage.readers]
        for reader in storage.readers:
            path = self.enclosing.get(reader, ())
            # Regions that the reader is in and the producer is not.
            entered = path[self._common_depth(around, path) :]
            ends += [self.regions[region][-1] for region in entered]
            run = self.run_at.get(reader)
            if run is not None and run is not self.run_at.get(place):
                ends.append(run.places[-1])
        return max(ends, default=place)

    @staticmethod
    def _common_depth(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        """Return how many regions are around both."""
        return sum(a == b for a, b in zip(one, other, strict=False))

    # -- what regions recompute

    def recomputed_at(self, region: int) -> int | None:
        """Return the node before whose backward a region is recomputed: its last saver, if any."""
        savers = (place for place in self.regions[region] if self._saves_at(place) != "never")
        return max(savers, default=None)

    def recomputed_nodes(self, region: int) -> list[int]:
        """Return the nodes that a recompute runs: until all that the region holds is there.

        The last of that is what a node of its own saves, or what a region directly within it reads,
        which then does not begin. PyTorch stops before the last node's kernels if these make
        nothing that it saves.
        """
        nodes = self.regions[region]
        own_savers = [
            place
            for place in nodes
            if self.enclosing[place][-1] == region and self._saves_at(place) != "never"
        ]
        inner_begins = [self.regions[index][0] for index in self._regions_within(region)]
        last = max([*own_savers, *inner_begins], default=-1)
        is_own = last in own_savers and last not in inner_begins
        runs_last = is_own and self._saves_at(last) == "after"
        return [place for place in nodes if place < last or (runs_last and place == last)]

    def _regions_within(self, region: int) -> set[int]:
        """Return the regions directly within a region."""
        paths = (self.enclosing[place] for place in self.regions[region])
        return {path[path.index(region) + 1] for path in paths if path[-1] != region}

    def buffer_copies(self, places: Iterable[int]) -> Iterator[int]:
        """Yield the sizes of buffer copies with which these nodes can be recomputed."""
        return (size for place in places for size in self.graph.nodes[place].buffer_copies)

    def _saves_at(self, place: int) -> str:
        return self.graph.nodes[place].saves_at

    def is_kept(self, value: StoredValue) -> bool:
        """Return whether the value lives on after the forward."""
        return bool(value.holders) or self.is_sent(value.storage)


def _enclosing_regions(
    nodes: Sequence[int], regions: Sequence[Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Return the regions (by index) around each node, from the outermost on."""
    enclosing: dict[int, tuple[int, ...]] = dict.fromkeys(nodes, ())
    # Larger regions contain smaller ones, so the outermost comes first.
    for index in sorted(range(len(regions)), key=lambda index: -len(regions[index])):
        for place in regions[index]:
            enclosing[place] += (index,)
    return enclosing
