"""What a stage stores, sends and recomputes, found the long way from the whole graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipecompile.ir.graph import Tensor
from tests.memory_model.naive_encodings import Key, NaiveEncodings

__all__ = ["NaiveStorages"]


@dataclass
class _StridedCopy:
    """An input laid out with gaps again.

    A forward frees it when the nodes in `until` are done, unless some need it again.
    """

    key: Key
    size: int
    until: set[str]
    savers: list[str]
    holders: list[str]
    is_sent: bool


class NaiveStorages(NaiveEncodings):
    """A stage with its messages, strided copies and regions."""

    def inside(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [name for name in self.order if name in wanted and self.stage_of[name] == self.index]

    def is_later(self, names: Iterable[str]) -> bool:
        return any(self.stage_of[name] > self.index for name in names)

    def readers(self, storage: int) -> set[str]:
        return {
            name
            for tensor in self.graph.tensors
            if tensor.storage == storage
            for name in tensor.consumers
        }

    def savers(self, storage: int) -> list[str]:
        return self.inside(node.name for node in self.graph.nodes if storage in node.saved)

    def is_sent(self, storage: int) -> bool:
        tensors = [
            tensor for tensor in self.graph.tensors if tensor.storage == storage and tensor.is_dense
        ]
        own = [tensor for tensor in tensors if self.stage_of[tensor.producer] == self.index]
        return self.is_later(name for tensor in own for name in tensor.consumers)

    @cached_property
    def sent_copies(self) -> dict[Key, int]:
        """Views with gaps or repeated elements that are sent as copies, also relayed ones."""
        leaving = [
            tensor
            for tensor in self.graph.tensors
            if self.leaves(tensor.producer, tensor.consumers)
        ]
        own = [t for t in leaving if self.stage_of[t.producer] == self.index and not t.is_dense]
        others = [
            t
            for t in leaving
            if self.stage_of[t.producer] < self.index
            and t.strided_copy_bytes
            and t.gradient_bytes
            and self.inside(t.consumers)
        ]
        return {("copy", tensor.producer): tensor.bytes for tensor in [*own, *others]}

    @property
    def messages(self) -> dict[Key, int]:
        """What is sent: storages, copies of views, and inputs that were laid out with gaps."""
        storages: dict[Key, int] = {
            (s,): self.graph.storages[s] for s in filter(self.is_sent, self.own_storages())
        }
        return (
            storages
            | self.sent_copies
            | {copy.key: copy.size for copy in self.strided_copies if copy.is_sent}
        )

    def names_in(self, key: Key) -> list[str]:
        """Return the tensors that lie in a message of this stage."""
        if key[0] in ("copy", "strided copy"):
            (tensor,) = [t for t in self.graph.tensors if t.producer == key[1]]
            if key[0] == "copy":
                return [key[1]]
        storage = key[0] if key[0] != "strided copy" else tensor.storage
        alike = [
            t
            for t in self.graph.tensors
            if t.storage == storage and t.is_dense and self.is_later(t.consumers)
        ]
        return [t.producer for t in alike if self.stage_of[t.producer] == self.index]

    def relays_input(self, name: str) -> bool:
        """Whether an input is relayed as it arrived, or as a view of it."""
        return bool(self.leaves_as(name))

    def leaves_as(self, name: str) -> list[str]:
        """Return the names under which an input is relayed."""
        (tensor,) = [t for t in self.graph.tensors if t.producer == name]
        leaving = [t for t in self.graph.tensors if self.leaves(t.producer, t.consumers)]
        plain = [t for t in leaving if ("copy", t.producer) not in self.sent_copies]
        alike = [
            t
            for t in plain
            if t.storage == tensor.storage is not None
            and t.is_dense
            and not tensor.strided_copy_bytes
        ]
        return [t.producer for t in plain if t == tensor or t in alike]

    @cached_property
    def strided_copies(self) -> list[_StridedCopy]:
        """The inputs that are laid out with gaps again as they arrive."""
        return [
            self._strided_copy(tensor) for tensor in self.read_inputs() if tensor.strided_copy_bytes
        ]

    def _strided_copy(self, tensor: Tensor) -> _StridedCopy:
        seen, views, sent = set(tensor.consumers), [tensor], False
        while views:
            view = views.pop()
            seen |= set(view.consumers)
            sent |= view is not tensor and view.is_dense and self.is_later(view.consumers)
            inside = self.inside(view.consumers)
            views += [
                t
                for t in self.graph.tensors
                if t.producer in inside and t.storage == tensor.storage is not None
            ]
        savers = [
            name for name in self.inside(seen) if tensor.storage in self.graph.by_name[name].saved
        ]
        regions = [set(region) for region in self.regions if set(region) & seen]
        runs = [name for reader in seen for name in self.run_of(reader)]
        holders = [name for name in savers if not self.region(name)]
        for index, region in enumerate(self.regions):
            if (
                self.region_around(region) is None
                and self.is_recomputed(index)
                and set(region) & seen
            ):
                holders.append(region[0])
        until = {name for name in seen if self.stage_of[name] >= self.index}.union(runs, *regions)
        return _StridedCopy(
            ("strided copy", tensor.producer),
            tensor.strided_copy_bytes,
            until,
            savers,
            self.inside(holders),
            sent,
        )

    def region(self, name: str) -> Sequence[str]:
        """Return the outermost region that a node is in; empty if it is in none."""
        return max((region for region in self.regions if name in region), key=len, default=())

    def regions_beginning(self, name: str) -> list[int]:
        """Return the regions that begin with a node."""
        return [index for index, region in enumerate(self.regions) if region[0] == name]

    def buffer_copy_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of buffer copies with which these nodes can be recomputed."""
        return sum(sum(self.graph.by_name[name].buffer_copies) for name in names)

    def region_around(self, names: Iterable[str]) -> int | None:
        """Return the innermost region that contains these nodes and others."""
        wanted = set(names)
        collected = [
            index for index, region in enumerate(self.regions) if wanted <= set(region) != wanted
        ]
        return min(collected, key=lambda index: len(self.regions[index]), default=None)

    def innermost_region(self, name: str) -> int | None:
        collected = [index for index, region in enumerate(self.regions) if name in region]
        return min(collected, key=lambda index: len(self.regions[index]), default=None)

    def recompute_holding(self, region_index: int | None, storage: int) -> int | None:
        """Return the region whose recompute made what a region holds: its own, or one around it."""
        while (
            region_index is not None and self.producer_of(storage) not in self.regions[region_index]
        ):
            region_index = self.region_around(self.regions[region_index])
        return region_index

    def inputs_of_region(self, region_index: int) -> list[int]:
        """Return what a region reads from outside."""
        nodes = set(self.regions[region_index])
        used = [s for s in self.own_storages() if nodes & (self.readers(s) | set(self.savers(s)))]
        return [storage for storage in used if self.producer_of(storage) not in nodes]

    def is_recomputed(self, region_index: int) -> bool:
        return any(
            self.graph.by_name[name].saves_at != "never" for name in self.regions[region_index]
        )

    def saves_of(self, region_index: int) -> list[tuple[int, bool, Key, Sequence[int]]]:
        """Return what is saved for a region in its recompute, in order.

        Each row says before or after which of its nodes, by whom, and which storages.
        """
        names = self.regions[region_index]
        collected: list[tuple[int, bool, Key, Sequence[int]]] = []
        for number, name in enumerate(names):
            node = self.graph.by_name[name]
            if self.innermost_region(name) == region_index and node.saves_at != "never":
                collected.append((number, node.saves_at == "after", ("node", name), node.saved))
        for inner, region in enumerate(self.regions):
            if inner != region_index and self.region_around(region) == region_index:
                collected.append(
                    (names.index(region[0]), False, ("region", inner), self.inputs_of_region(inner))
                )
        return sorted(collected)

    def holders(self, storage: int) -> list[str]:
        """Return whose backwards need what the forward kept.

        These are savers outside regions, and the first nodes of regions that are recomputed.
        """
        home = self.region(self.producer_of(storage) or "")
        formed = {name for _, encoding in self.encodings_of(storage) for name in encoding.savers}
        collected = [
            name for name in self.savers(storage) if not self.region(name) and name not in formed
        ]
        for index, region in enumerate(self.regions):
            is_outer = self.region_around(region) is None and self.is_recomputed(index)
            if (
                is_outer
                and region is not home
                and set(region) & (self.readers(storage) | set(self.savers(storage)))
            ):
                collected.append(region[0])
        return self.inside(collected)

    def is_freed(self, storage: int, done: set[str]) -> bool:
        """Whether nothing needs a storage once the nodes in `done` have run."""
        users = {
            encoding.encoded_at
            for _, encoding in self.encodings_of(storage)
            if encoding.waits_for_end
        }
        users |= {name for run in self.runs_reading(storage) for name in run}
        is_read = users <= done and self.read_by(storage, done)
        return not self.is_sent(storage) and not self.holders(storage) and is_read

    def runs_reading(self, storage: int) -> list[Sequence[str]]:
        """Return the encoded runs that read a storage that was produced before them."""
        maker = self.producer_of(storage)
        return [
            run for reader in self.readers(storage) if maker not in (run := self.run_of(reader))
        ]

    def read_by(self, storage: int, done: set[str]) -> bool:
        """Whether all readers have run, to the end of the regions that read the storage."""
        regions = [
            set(region) for region in self.regions if self.producer_of(storage) not in region
        ]
        waiting = [region for region in regions if region & self.readers(storage)]
        return set().union(self.readers(storage), *waiting) <= done

    def read_inputs(self) -> list[Tensor]:
        """Return the inputs that are read here."""
        arriving = [
            tensor
            for tensor in self.graph.tensors
            if self.arrives(tensor.producer, tensor.consumers)
        ]
        return [tensor for tensor in arriving if self.inside(tensor.consumers)]

    def arrives(self, producer: str, consumers: Iterable[str]) -> bool:
        return self.stage_of[producer] < self.index and any(
            self.stage_of[name] >= self.index for name in consumers
        )

    def leaves(self, producer: str, consumers: Iterable[str]) -> bool:
        return self.stage_of[producer] <= self.index and self.is_later(consumers)
