"""Copied nodes of a cost graph: each stage that reads them runs them itself.

A cut places the other nodes only. For positions p that a, in stage 0, and b, in stage 2, read:

    graph, copied=("p",)       ids ── p ──▶ a, b           ids is a model input
    without_copied             ids ──▶ a, b                the partitioner cuts this one
    with_copies                ids ── p ──▶ a              what stage 0 runs
                               ids ── p@2 ──▶ b            what stage 2 runs: ids is relayed to it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, Tensor

__all__ = ["CutGraph", "with_copies", "without_copied"]


class CutGraph(NamedTuple):
    """A cost graph in which each copy is a node of its own, and the stages of all of its nodes.

    The first copy of a node has the node's own name. `originals` are the nodes of the others.
    """

    graph: CostGraph
    assignment: Mapping[str, int]
    originals: Mapping[str, str]

    def names_in(self, stage: int, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the nodes that run `nodes` in a stage."""
        copies = {
            name: copy for copy, name in self.originals.items() if self.assignment[copy] == stage
        }
        return tuple(copies.get(name, name) for name in nodes)


def with_copies(graph: CostGraph, assignment: Mapping[str, int]) -> CutGraph:
    """Return the graph with a node for each copy; `assignment` has the stages of all other nodes.

    Each stage that reads the value of a copied node has a copy, with a storage of its own.
    """
    # A copy in another stage is made there and freed there: if it shared the storage of the first
    # one, the memory of one rank would count what lies on another.
    stages = _stages(graph, assignment)
    copies = _Copies(graph, stages, _storages_of_copies(graph, stages))
    sources = [*range(len(graph.storages)), *copies.added_storages]
    named = {
        copies.name(name, stage): (name, stage) for name in graph.copied for stage in stages[name]
    }
    return CutGraph(
        replace(
            graph,
            copied=(),
            nodes=tuple(node for each in graph.nodes for node in copies.nodes(each)),
            tensors=tuple(tensor for each in graph.tensors for tensor in copies.tensors(each)),
            storages=tuple(graph.storages[source] for source in sources),
            contents=tuple(graph.contents[source] for source in sources) if graph.contents else (),
        ),
        dict(assignment) | {copy: stage for copy, (_, stage) in named.items()},
        {copy: name for copy, (name, _) in named.items() if copy != name},
    )


def _stages(graph: CostGraph, assignment: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the stages of all nodes: of a copied one, in ascending order, those of its readers."""
    readers = {tensor.producer: tensor.consumers for tensor in graph.tensors}
    stages: dict[str, tuple[int, ...]] = {
        node.name: (assignment[node.name],)
        for node in graph.nodes
        if node.name not in graph.copied_set
    }
    # From the last one on, since a copied node may be read by other ones.
    for name in sorted(graph.copied, key=graph.places.__getitem__, reverse=True):
        stages[name] = tuple(
            sorted({stage for reader in readers[name] for stage in stages[reader]})
        )
    return stages


def _storages_of_copies(
    graph: CostGraph, stages: Mapping[str, tuple[int, ...]]
) -> dict[tuple[int, int], int]:
    """Return, by storage and stage, the number of the storage that the copies there lie in."""
    used: dict[int, set[int]] = {}
    for tensor in graph.tensors:
        if tensor.producer in graph.copied_set and tensor.storage is not None:
            used.setdefault(tensor.storage, set()).update(stages[tensor.producer])
    numbers: dict[tuple[int, int], int] = {}
    # With storages 0 to 4, a copied value in storage 2 and copies in stages 0 and 2: the first
    # one keeps number 2, and that in stage 2 gets number 5.
    following = len(graph.storages)
    for storage, own in sorted(used.items()):
        first, *others = sorted(own)
        numbers[storage, first] = storage
        for stage in others:
            numbers[storage, stage] = following
            following += 1
    return numbers


@dataclass(frozen=True)
class _Copies:
    """What the nodes and tensors of a graph become in it with copies."""

    graph: CostGraph
    stages: Mapping[str, tuple[int, ...]]
    storages: Mapping[tuple[int, int], int]

    @property
    def added_storages(self) -> list[int]:
        """The storages that the added ones are like, in the order of their numbers."""
        of_number = {number: storage for (storage, _), number in self.storages.items()}
        return [of_number[number] for number in sorted(of_number) if number != of_number[number]]

    def name(self, node: str, stage: int) -> str:
        """Return the name of the node that runs `node` in a stage."""
        return node if stage == self.stages[node][0] else f"{node}@{stage}"

    def nodes(self, node: Node) -> Iterator[Node]:
        """Yield what runs `node`, one in each of its stages."""
        for stage in self.stages[node.name]:
            saved = tuple(self.storages.get((storage, stage), storage) for storage in node.saved)
            name = self.name(node.name, stage)
            # Most nodes are as they were, and stay the same objects.
            is_same = (name, saved) == (node.name, node.saved)
            yield node if is_same else replace(node, name=name, saved=saved)

    def tensors(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the value of each copy of the tensor's producer, with the readers that it has."""
        if tensor.producer not in self.graph.copied_set:
            if self.graph.copied_set.isdisjoint(tensor.consumers):
                yield tensor
            else:
                # `ids` in the drawing is read by p in stage 0 and by p@2: by all copies, wherever
                # they are.
                yield self._read_by(tensor, self._all_stages)
            return
        for stage in self.stages[tensor.producer]:
            storage = tensor.storage
            yield replace(
                self._read_by(tensor, frozenset({stage})),
                producer=self.name(tensor.producer, stage),
                storage=None if storage is None else self.storages[storage, stage],
            )

    @cached_property
    def _all_stages(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(self.stages.values()))

    def _read_by(self, tensor: Tensor, within: frozenset[int]) -> Tensor:
        """Return the tensor with those readers, or copies of them, that lie in these stages."""

        def named(readers: Iterable[str]) -> tuple[str, ...]:
            return tuple(
                self.name(reader, stage)
                for reader in readers
                for stage in self.stages[reader]
                if stage in within
            )

        return replace(
            tensor,
            consumers=named(tensor.consumers),
            consumers_without_gradient=named(tensor.consumers_without_gradient),
        )


def without_copied(graph: CostGraph) -> CostGraph:
    """Return the graph that is cut: its copied nodes are gone, and what they read is read by the
    readers of their values.

    So what it takes and holds is a lower bound of what the graph with copies does.
    """
    if not graph.copied:
        return graph
    # What nodes save of copies is left out too, or the rest would hold it for nobody.
    storages = {tensor.storage for tensor in graph.tensors if tensor.producer in graph.copied_set}
    return replace(
        graph,
        copied=(),
        nodes=tuple(
            _without_storages(node, storages)
            for node in graph.nodes
            if node.name not in graph.copied_set
        ),
        tensors=tuple(_tensors_without_copied(graph)),
    )


def _without_storages(node: Node, storages: set[int | None]) -> Node:
    """Return the node without what it saves of copies."""
    kept = [index for index, storage in enumerate(node.saved) if storage not in storages]
    if len(kept) == len(node.saved):
        return node
    return replace(
        node,
        saved=tuple(node.saved[index] for index in kept),
        uses=tuple(node.uses[index] for index in kept) if node.uses else (),
    )


def _tensors_without_copied(graph: CostGraph) -> Iterator[Tensor]:
    direct = {tensor.producer: tensor.consumers for tensor in graph.tensors}
    # By copied node the nodes that read its value, or what other copied nodes make of it.
    readers: dict[str, dict[str, None]] = {}

    def through_copies(consumers: Iterable[str]) -> dict[str, None]:
        # ids is read by p and p by a and b: through p, ids is read by a and b.
        found: dict[str, None] = {}
        for name in consumers:
            found |= readers[name] if name in graph.copied_set else {name: None}
        return found

    for name in sorted(graph.copied, key=graph.places.__getitem__, reverse=True):
        readers[name] = through_copies(direct[name])
    for tensor in graph.tensors:
        if tensor.producer in graph.copied_set:
            continue
        if graph.copied_set.isdisjoint(tensor.consumers):
            yield tensor
            continue
        plain = {name for name in tensor.consumers if name not in graph.copied_set}
        found = sorted(through_copies(tensor.consumers), key=graph.places.__getitem__)
        # What reads it through copies gives no gradient for it, as copies have none.
        giving = plain.difference(tensor.consumers_without_gradient)
        yield replace(
            tensor,
            consumers=tuple(found),
            consumers_without_gradient=tuple(name for name in found if name not in giving),
        )
