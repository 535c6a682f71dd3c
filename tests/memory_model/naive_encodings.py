"""The storages that a stage produces, and their encodings, found the long way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipecompile.ir.graph import CostGraph, Node

__all__ = ["EncodedNames", "EncodedStorage", "Key", "NaiveEncodings"]

Key = tuple[Any, ...]
EncodedNames = tuple[Sequence[str], Sequence[str]]
WIDTHS = {"bool": 1, "float16": 2, "float32": 4, "int64": 8}


@dataclass
class EncodedStorage:
    """What stands for a storage: its bytes, workspace while it is made or read, and its savers."""

    storage: int
    size: int
    workspace: int
    encoded_at: str
    waits_for_end: bool
    savers: list[str]
    decoded_at: str


class NaiveEncodings:
    """One of a cut's stages: which storages live how long, read off the graph.

    `regions` are recomputed, and known by their index; None stands for the forward. The saved
    tensors of nodes in `encoded_runs` are encoded by encodings.
    """

    def __init__(
        self,
        graph: CostGraph,
        cut: Sequence[Sequence[str]],
        index: int,
        regions: Sequence[Sequence[str]],
        encoded_runs: Sequence[EncodedNames] = (),
    ) -> None:
        self.graph, self.index, self.regions, self.encoded_runs = (
            graph,
            index,
            regions,
            encoded_runs,
        )
        self.stage_of = {name: stage for stage, names in enumerate(cut) for name in names}
        self.nodes = [node for node in graph.nodes if self.stage_of[node.name] == index]
        self.order = [node.name for node in graph.nodes]
        self.encodings = self._encode()

    def run_of(self, name: str) -> Sequence[str]:
        """Return the encoded run that a node is in; empty if it is in none."""
        return next((names for names, _ in self.encoded_runs if name in names), ())

    def _encode(self) -> dict[Key, EncodedStorage]:
        collected: dict[Key, EncodedStorage] = {}
        for names, encodings in self.encoded_runs:
            waits = "relu" in encodings or "pool" in encodings
            for storage in self.own_storages():
                uses = [
                    (name, use)
                    for name in self._savers_in(names, storage)
                    for use in self._uses(name, storage)
                ]
                small = [self._by_use(use, encodings, storage) for _, use in uses]
                if not uses or not self.graph.contents[storage] or not self.graph.storages[storage]:
                    continue
                if None not in small:
                    for number, ((name, _), sizes) in enumerate(zip(uses, small, strict=True)):
                        assert sizes is not None
                        collected[storage, name, number] = EncodedStorage(
                            storage, *sizes, names[-1], True, [name], name
                        )
                    continue
                for encoding in encodings:
                    if (sizes := self._for_any_use(encoding, storage)) is not None:
                        savers = self._savers_in(names, storage)
                        made = names[-1] if waits else savers[0]
                        encoding = collected.setdefault(
                            (storage, encoding),
                            EncodedStorage(storage, *sizes, made, waits, [], ""),
                        )
                        encoding.savers += savers
                        encoding.decoded_at = (
                            names[-1]
                            if encoding == "offload" and self.graph.allocator == "cuda"
                            else savers[-1]
                        )
                        break
        return collected

    def _savers_in(self, names: Sequence[str], storage: int) -> list[str]:
        return [name for name in names if storage in self.graph.by_name[name].saved]

    def _uses(self, name: str, storage: int) -> tuple[str, ...]:
        node = self.graph.by_name[name]
        return node.uses[node.saved.index(storage)] if node.uses else ("other",)

    def _count(self, storage: int) -> int:
        content = self.graph.contents[storage]
        assert content is not None
        return self.graph.storages[storage] // WIDTHS[content.dtype]

    def _by_use(self, use: str, encodings: Sequence[str], storage: int) -> tuple[int, int] | None:
        content = self.graph.contents[storage]
        if content is None or use == "other" or use.split()[0] not in encodings:
            return None
        if use == "pool input":
            return 0, 0
        count = self._count(storage)
        if use == "relu":
            return -(-count // 8), 2 * min(
                count, 1 << (16 if self.graph.allocator == "cpu" else 22)
            )
        width = next(
            (w for bits, w in ((8, 1), (15, 2), (31, 4)) if (content.bound or 2**63) <= 2**bits),
            None,
        )
        return None if width is None else (count * width, 0)

    def _for_any_use(self, encoding: str, storage: int) -> tuple[int, int] | None:
        content, size, on_cpu = (
            self.graph.contents[storage],
            self.graph.storages[storage],
            self.graph.allocator == "cpu",
        )
        assert content is not None
        count, chunk = self._count(storage), 1 << (16 if on_cpu else 22)
        if encoding == "mask" and (content.dtype == "bool" or (content.is_mask and on_cpu)):
            return -(-count // 8), (1 + (WIDTHS[content.dtype] if on_cpu else 1)) * min(
                count, chunk
            )
        if encoding == "half" and content.dtype == "float32":
            return size // 2, 0
        return (size * on_cpu, 0) if encoding == "offload" else None

    def produced_by(self, node: Node) -> list[int]:
        """Return the storages that `node` produces; inputs of the minibatch are buffers."""
        if node.operator == "placeholder":
            return []
        return [
            storage
            for storage in range(len(self.graph.storages))
            if self.producer_of(storage) == node.name
        ]

    def producer_of(self, storage: int) -> str | None:
        makers = {tensor.producer for tensor in self.graph.tensors if tensor.storage == storage}
        makers = makers or {node.name for node in self.graph.nodes if storage in node.saved}
        return min(makers, key=self.order.index, default=None)

    def own_storages(self) -> list[int]:
        return [storage for node in self.nodes for storage in self.produced_by(node)]

    def encodings_of(self, storage: int) -> list[tuple[Key, EncodedStorage]]:
        """Return the encodings of a storage."""
        return [
            (key, encoding)
            for key, encoding in self.encodings.items()
            if encoding.storage == storage
        ]

    def own_encodings(self) -> list[tuple[Key, EncodedStorage]]:
        return [
            collected for storage in self.own_storages() for collected in self.encodings_of(storage)
        ]
