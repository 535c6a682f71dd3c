"""Which nodes may never be cut apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pipecompile.graph.autograd_context import cast_once
from pipecompile.graph.modules import belongs
from pipecompile.graph.storages import storage_key

__all__ = ["Group"]

INPUTS, OUTPUTS = "inputs", "outputs"


@dataclass(frozen=True)
class Group:
    """Names groups of nodes that share a stage.

    Requires `meta["val"]`, `meta["state"]`, `meta["mutates"]` and `meta["casts"]` (propagate). Ensures that
    `meta["group"]` is one name for: the inputs and the first operation, the output and the last one; a collection and
    the nodes that take it apart; all nodes that touch a storage up to its last write; a tensor and its hooks; what
    `torch.autograd.grad` goes back through; the readers of a parameter that autocast casts once for all of them; and
    each of `together`, sets of names of nodes or modules.
    """

    together: tuple[tuple[str, ...], ...] = ()

    def requires(self, graph: fx.Graph) -> None:
        """Values and mutations are known."""
        noted = ("val", "state", "mutates", "casts")
        assert all(name in node.meta for node in graph.nodes for name in noted), "propagate first"

    def __call__(self, graph: fx.Graph) -> None:
        """Sets `meta["group"]`, None for a node on its own."""
        nodes = [node for node in graph.nodes if node.op != "get_attr"]
        order = {node: index for index, node in enumerate(nodes)}
        links = nx.Graph()
        links.add_nodes_from(nodes)
        for members in (
            *_ends(nodes),
            *_collections(nodes),
            *_mutations(nodes),
            *_hooks(nodes),
            *_gradients(nodes),
            *cast_once(nodes),
            *self._chosen(nodes),
        ):
            nx.add_path(links, members)
        for component in nx.connected_components(links):
            first = min(component, key=order.__getitem__)
            name = _name(component, first) if len(component) > 1 else None
            for node in component:
                node.meta["group"] = name

    def ensures(self, graph: fx.Graph) -> None:
        """Every node that can be placed has been considered."""
        assert all("group" in node.meta for node in graph.nodes if node.op != "get_attr")

    def _chosen(self, nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
        for names in self.together:
            yield [node for node in nodes if any(belongs(node, name) for name in names)]


def _name(component: Iterable[fx.Node], first: fx.Node) -> str:
    if any(node.op == "placeholder" for node in component):
        return INPUTS
    return OUTPUTS if any(node.op == "output" for node in component) else first.name


def _ends(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """A stage without work would be a rank without work: inputs and output stay with an operation."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    operations = [node for node in nodes if node.op not in ("placeholder", "output")]
    yield inputs + operations[:1]
    yield operations[-1:] + [node for node in nodes if node.op == "output"]


def _collections(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Only tensors travel: who takes a tuple apart stays with who made it."""
    for node in nodes:
        if node.op not in ("placeholder", "output") and not isinstance(node.meta["val"], Tensor):
            yield [node, *(user for user in node.users if user.op != "output")]


def _mutations(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """A copy sent to another rank would not see a write: who touches a storage up to its last write stays together.

    Who reads it later may lie later, since what is sent is what the storage holds when its stage is through. State is
    not sent: all who touch a parameter or buffer that is written to stay together, modules that have it among them.
    """
    read = (
        source.meta["val"]
        for node in nodes
        for source in node.all_input_nodes
        if source.op == "get_attr"
    )
    state = {
        storage_key(value)
        for value in (*read, *(each for node in nodes for each in node.meta["state"]))
    }
    touching: dict[int, list[fx.Node]] = {}
    through: dict[
        int, int
    ] = {}  # storage → how many of those who touch it do so up to its last write
    for node in nodes:
        written = {storage_key(tensor) for tensor in node.meta["mutates"]}
        for key in _touched(node) | written:
            touching.setdefault(key, []).append(node)
            if key in written or (key in through and key in state):
                through[key] = len(touching[key])
    yield from (touching[key][:count] for key, count in through.items())


def _touched(node: fx.Node) -> set[int]:
    sources = [node, *node.all_input_nodes] if node.op != "output" else node.all_input_nodes
    values = [
        leaf
        for source in sources
        for leaf in tree_leaves(source.meta["val"])
        if isinstance(leaf, Tensor)
    ]
    return {storage_key(value) for value in (*values, *node.meta["state"])}


def _hooks(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """A hook sees the whole gradient where its tensor is made, and only there."""
    for node in nodes:
        if node.meta.get("hook"):
            yield [node.all_input_nodes[0], node]


def _gradients(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """A gradient that the forward itself takes is taken through what lies between, on one stage."""
    for node in nodes:
        if node.target is torch.autograd.grad:
            before = _closure(node.all_input_nodes, lambda each: each.all_input_nodes)
            wanted = node.args[1] if len(node.args) > 1 else node.kwargs["inputs"]
            sources = [each for each in tree_leaves(wanted) if isinstance(each, fx.Node)]
            after = _closure(sources, lambda each: each.users)
            yield [
                each
                for each in nodes
                if each is node or each in sources or (each in before and each in after)
            ]


def _closure(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(start)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(step(node))
    return found
