"""Cheap nodes: which nodes each stage had better run itself than receive their values.

Rotary cosines, masks and position ids are made once and read in every layer. To relay them costs a
transfer at each boundary, and memory for each microbatch in flight; to compute them anew costs a
few small kernels in each stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.links import Links

__all__ = ["with_cheap_nodes_copied"]

FREE_SHARE = 200  # a copy may take 1 / 200 of the mean load, however fast transfers are
TOTAL_SHARE = 100  # all copies in a stage may take 1 / 100 of it: the cut is searched without them


def with_cheap_nodes_copied(
    graph: CostGraph, k: int, links: Links, pinned: Collection[str] = ()
) -> CostGraph:
    """Return the graph with its cheap nodes copied, for `k` stages with these links.

    A node is cheap if it and what it is computed from, as far as that is copied too, take no longer
    than one transfer of its value, or a small share of a stage's load. To relay what is not copied
    to it takes less than to relay its value. All copies of a stage together take a small share of
    its load, so whatever the cut, no stage is longer than with relays by more than that. Nodes in
    groups, and those `pinned` to a stage, are not copied.
    """
    load_ns = sum(node.forward_ns + node.backward_ns for node in graph.nodes) // k
    if k == 1 or not load_ns:
        return graph
    fixed = {*pinned, *_bound(graph)}
    copyable = {n.name: None for n in graph.nodes if _may_be_copied(n) and n.name not in fixed}
    choice = _Choice(graph, links, load_ns)
    for name in _with_whole_storages(graph, _shared(graph, copyable)):
        choice.consider(graph.by_name[name])
    return replace(graph, copied=tuple(_with_whole_storages(graph, choice.sources)))


def _may_be_copied(node: Node) -> bool:
    # A backward would run in several stages, whose gradients nobody sums.
    has_backward = node.backward_ns or node.saved or node.per_step_ns
    return node.is_copyable and node.group is None and not has_backward


def _bound(graph: CostGraph) -> Iterator[str]:
    """Yield the nodes that have to do with gradients, or are recomputed with others."""
    yield from chain.from_iterable(graph.recomputed_together)
    for gradient in graph.gradients:
        yield from (gradient.producer, gradient.last, *gradient.readers, *gradient.captured_at)
    yield from (tensor.producer for tensor in graph.tensors if tensor.gradient_bytes)


def _shared(graph: CostGraph, names: Collection[str]) -> list[str]:
    """Return those of the nodes `names` that several nodes read, also through others of them.

    What one node alone reads lies in its stage anyway. Of what takes no time, such as views, all
    are returned: a view is copied with what it is a view of.
    """
    readers = {tensor.producer: tensor.consumers for tensor in graph.tensors}
    found: dict[str, None] = {}
    for name in sorted(names, key=graph.places.__getitem__, reverse=True):
        read_by = readers.get(name, ())
        is_free = not graph.by_name[name].forward_ns
        if is_free or len(read_by) > 1 or not found.keys().isdisjoint(read_by):
            found[name] = None
    return [*reversed(found)]


def _with_whole_storages(graph: CostGraph, names: Collection[str]) -> list[str]:
    """Return those of the nodes `names` that are read, and share a storage with no other node.

    A view of something that is not copied lies in the message that is relayed.
    """
    shared = {t.storage for t in graph.tensors if t.producer not in names} - {None}
    read = {t.producer for t in graph.tensors if t.consumers and t.storage not in shared}
    return [name for name in names if name in read]


@dataclass
class _Choice:
    """The copied nodes so far: by name the copied nodes that each is computed from, itself
    included, and the other nodes that these read.
    """

    graph: CostGraph
    links: Links
    load_ns: int
    sources: dict[str, frozenset[str]] = field(default_factory=dict)
    roots: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tensors = {tensor.producer: tensor for tensor in self.graph.tensors}
        self._read: dict[str, list[str]] = {}
        for tensor in self.graph.tensors:
            for name in tensor.consumers:
                self._read.setdefault(name, []).append(tensor.producer)
        self._left_ns = self.load_ns // TOTAL_SHARE

    def consider(self, node: Node) -> None:
        """Copy `node` if that is worth it; nodes come in the order of the graph."""
        read = self._read.get(node.name, ())
        copied = [name for name in read if name in self.sources]
        # Sets, since two inputs may come from one copied node, which the stage runs once.
        sources = frozenset({node.name}).union(*(self.sources[name] for name in copied))
        roots = frozenset(set(read).difference(copied)).union(*(self.roots[n] for n in copied))
        ns = sum(self.graph.by_name[name].forward_ns for name in sources)
        is_quick = ns <= max(self._transfer_ns(node.name), self.load_ns // FREE_SHARE)
        if is_quick and self._is_less(roots, node.name) and node.forward_ns <= self._left_ns:
            self._left_ns -= node.forward_ns
            self.sources[node.name], self.roots[node.name] = sources, roots

    def _is_less(self, roots: Collection[str], name: str) -> bool:
        """Return whether to relay `roots` is less than to relay the value of the node."""
        sizes = (self._tensors[n].bytes + self._tensors[n].gradient_bytes for n in roots)
        return not roots or (
            sum(sizes) < self._tensors[name].bytes
            and sum(map(self._transfer_ns, roots)) <= self._transfer_ns(name)
        )

    def _transfer_ns(self, name: str) -> int:
        """Return what the value of a node takes over the fastest link."""
        size = self._tensors[name].bytes
        return min(link.transfer_ns(size) for _, _, link in self.links.pairs())
