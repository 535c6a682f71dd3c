"""The values of one stage: what its nodes make and who needs it, what it copies, what regions hold.

Part of the memory model, see memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from pipecompile.ir.graph import Tensor
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.encodings import StorageEncoding, EncodedPlaces, storage_encodings
from pipecompile.memory_model.gradients import GradientFlow
from pipecompile.memory_model.live_ranges import LiveRanges, Storage
from pipecompile.memory_model.subgraph import StageSubgraph

__all__ = ["BOUND_SCRATCH", "Counting", "StoredValue", "StageValues"]

BOUND_SCRATCH = 1 + Fraction(1, 10)  # how much larger a bound takes the scratch of kernels to be


class StoredValue(NamedTuple):
    """A storage that the node of this place makes.

    `holders` are the places whose backwards need what the forward kept, in order: savers outside regions, and the first
    nodes of regions that read it and save anything (others are never computed again). `copies` are what regions that it
    lies in make of it and hold, from the outermost on. `forms` stand for it where others save it. Where nobody holds
    it, `last` is where a forward lets it go.
    """

    place: int
    storage: Storage
    holders: tuple[int, ...]
    copies: tuple[RegionCopy, ...]
    forms: tuple[StorageEncoding, ...]
    last: int


class RegionCopy(NamedTuple):
    """What a region (by index) makes anew and holds until the backward of a node is done.

    If `early`, only until that backward has computed again a region within, which reads it.
    """

    region: int
    place: int
    early: bool


class Counting(NamedTuple):
    """How sizes are counted, as expected or for a bound: the scratch of kernels times a factor, and storages."""

    scratch: Fraction | int
    size_of: Callable[[int], int]


class StageValues(StageSubgraph):
    """One stage with `regions` and `runs` of its nodes, which lie apart."""

    def __init__(
        self,
        lives: LiveRanges,
        before: set[int],
        nodes: Sequence[int],
        regions: Sequence[Sequence[int]] = (),
        runs: Sequence[EncodedPlaces] = (),
    ) -> None:
        super().__init__(lives, before, nodes)
        self.regions = regions
        self.around = _around(nodes, regions)
        self.run = {place: run for run in runs for place in run.places}
        self.allocator = ALLOCATORS[lives.graph.allocator]
        self.gradients = GradientFlow(self)
        self.made = [
            self._made(place, each) for place in nodes for each in lives.storages.get(place, ())
        ]

    def is_sent(self, storage: Storage) -> bool:
        """Whether a message to a later stage is it itself."""
        return bool(self.sent_in(storage))

    def sent_in(self, storage: Storage) -> tuple[str, ...]:
        """The tensors that lie in it and travel so."""
        givers = {
            giver
            for giver, reader in storage.takers
            if giver in self.inside and self.is_later(reader)
        }
        return tuple(self.graph.nodes[giver].name for giver in sorted(givers))

    def is_copied(self, storage: Storage) -> bool:
        """Whether later stages get copies of its views only."""
        return any(map(self.is_later, storage.readers)) and not self.is_sent(storage)

    def _made(self, place: int, storage: Storage) -> StoredValue:
        """Where a storage that is made at `place` is needed again."""
        savers, home = (
            [saver for saver in storage.savers if saver in self.inside],
            self.around.get(place, ())[:1],
        )
        users = {
            self.around[user][0] for user in (*storage.readers, *savers) if self.around.get(user)
        } - {*home}
        forms, plain = storage_encodings(
            storage, [s for s in savers if not self.around[s]], self.run, self.graph.allocator
        )
        holders = [
            *plain,
            *(self.regions[index][0] for index in users if self.called(index) is not None),
        ]
        last = max(
            self.last_read(place, storage), *(form.made for form in forms if form.waits), place
        )
        if any(map(self.is_later, storage.readers)):
            last = self.nodes[-1]  # then copies are made for them
        return StoredValue(
            place, storage, tuple(sorted(holders)), tuple(self._copied(place, storage)), forms, last
        )

    @cached_property
    def spread(self) -> list[StoredValue]:
        """What arrives dense and is brought into its layout again, with gaps, before the first node."""
        return [
            self._made(-1, self._spread(tensor))
            for tensor in self.read
            if tensor.strided_copy_bytes
        ]

    def _spread(self, tensor: Tensor) -> Storage:
        """Its copy, for those that read it or a view that this stage takes of it."""
        readers = set(map(self.lives.place.__getitem__, tensor.consumers)) - self.before
        takers: list[tuple[int, int]] = []
        for place in self.nodes:
            view = self.lives.values.get(self.graph.nodes[place].name) if place in readers else None
            if view is not None and view.storage == tensor.storage is not None:
                places = set(map(self.lives.place.__getitem__, view.consumers))
                readers |= places
                takers += [(place, reader) for reader in places if view.is_dense]
        savers = (
            place
            for place in readers & self.inside
            if tensor.storage in self.graph.nodes[place].saved
        )
        return Storage(
            tensor.strided_copy_bytes,
            tuple(sorted(readers)),
            tuple(sorted(savers)),
            takers=tuple(takers),
        )

    @property
    def handed_on(self) -> Iterator[str]:
        """What arrives and is sent on as it came, or in a view of it."""
        copied = {tensor.producer for tensor in self.copied}
        leaving = [tensor for tensor in self.leaving if tensor.producer not in copied]
        names = {tensor.producer for tensor in leaving}
        lying = {tensor.storage for tensor in leaving if tensor.is_dense} - {None}
        for tensor, _ in self.arriving:
            if tensor.producer in names or (
                tensor.storage in lying and not tensor.strided_copy_bytes
            ):
                yield tensor.producer

    @cached_property
    def copied(self) -> list[Tensor]:
        """What is sent as a copy."""
        read = {tensor.producer for tensor in self.read}
        return [
            tensor
            for tensor in self.leaving
            if (not tensor.is_dense and self.lives.place[tensor.producer] in self.inside)
            or (tensor.strided_copy_bytes and tensor.gradient_bytes and tensor.producer in read)
        ]

    def _copied(self, place: int, storage: Storage) -> Iterator[RegionCopy]:
        """What each region around `place` holds of the storage: for its own nodes, and for regions within it."""
        home = self.around.get(place, ())
        users = (
            {user for user in (*storage.readers, *storage.savers) if user in self.inside}
            if home
            else set()
        )
        for depth in range(1, len(home) + 1):
            beside = [u for u in users if self._meet(home, self.around[u]) == depth]
            ends = [(user, False) for user in beside if user in storage.savers]
            inner = {region for user in beside for region in self.around[user][depth:]}
            ends += [(at, True) for at in map(self.called, inner) if at is not None]
            if ends:
                yield RegionCopy(home[depth - 1], *min(ends))

    def last_read(self, place: int, storage: Storage) -> int:
        """Until when a forward has what is made at `place` and not held.

        A region, and a run of nodes that save by policies, has what it is given until it ends.
        """
        home = self.around.get(place, ())
        paths = [self.around.get(reader, ()) for reader in storage.readers]
        inner = [region for path in paths for region in path[self._meet(home, path) :]]
        runs = [self.run[reader] for reader in storage.readers if reader in self.run]
        ends = [run.places[-1] for run in runs if run is not self.run.get(place)]
        return max(
            [*storage.readers, *(self.regions[region][-1] for region in inner), *ends],
            default=place,
        )

    @staticmethod
    def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        """How many regions are around both."""
        return sum(a == b for a, b in zip(one, other, strict=False))

    def called(self, region: int) -> int | None:
        """The node in whose backward a region is computed again: its last one that saves anything."""
        return max(
            (place for place in self.regions[region] if self._packs(place) != "never"), default=None
        )

    def run_again(self, region: int) -> list[int]:
        """The nodes that are computed again: until there is all that is held for the region.

        The last of that is what a node of its own saves, or what a region within it reads, which then does not begin.
        """
        nodes = self.regions[region]
        own = [
            place
            for place in nodes
            if self.around[place][-1] == region and self._packs(place) != "never"
        ]
        within = [self.regions[index][0] for index in self._within(region)]
        last = max([*own, *within], default=-1)
        runs_last = last in own and last not in within and self._packs(last) == "after"
        return [place for place in nodes if place < last or (runs_last and place == last)]

    def _within(self, region: int) -> set[int]:
        """The regions directly within a region."""
        paths = (self.around[place] for place in self.regions[region])
        return {path[path.index(region) + 1] for path in paths if path[-1] != region}

    def written(self, places: Iterable[int]) -> Iterator[int]:
        """The sizes of copies by which these nodes can be computed again with buffers as they were."""
        return (size for place in places for size in self.graph.nodes[place].buffer_copies)

    def _packs(self, place: int) -> str:
        return self.graph.nodes[place].saves_at

    def is_kept(self, made: StoredValue) -> bool:
        """Whether it lives on after the forward."""
        return bool(made.holders) or self.is_sent(made.storage)

    @staticmethod
    def needed(rise: int, scratch: int, level: Counting) -> int:
        """What a node that makes `rise` live takes with the scratch of its kernels: without it, it does not run."""
        if not rise:
            return 0
        counted = -(-scratch * level.scratch.numerator // level.scratch.denominator)
        return rise + counted


def _around(nodes: Sequence[int], regions: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The regions (by index) that each node lies in, from the outermost on."""
    found: dict[int, tuple[int, ...]] = dict.fromkeys(nodes, ())
    for index in sorted(range(len(regions)), key=lambda index: -len(regions[index])):
        for place in regions[index]:
            found[place] += (index,)
    return found
