"""Groups: nodes that no cut may separate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pipecompile.graph.autograd_context import shared_cast_readers
from pipecompile.graph.modules import is_within
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key

__all__ = ["Group"]

INPUTS, OUTPUTS = "inputs", "outputs"


@dataclass(frozen=True)
class Group:
    """Sets `meta["group"]`: the name of the group that a node is in, None for a node on its own.

    Requires `meta["val"]`, `meta["state"]`, `meta["mutates"]` and `meta["cast_parameters"]`
    (propagate). Ensures that these nodes are in one group:

        the inputs and the first operation; the output and the last one
        a collection and the nodes that take items out of it
        all nodes that touch a storage, up to its last write
        a tensor and its hooks
        the nodes that a call of `torch.autograd.grad` goes back through
        the readers of a parameter that autocast casts once for all of them
        the nodes that each entry of `together` names, by the names of nodes or modules
    """

    together: tuple[tuple[str, ...], ...] = ()

    def requires(self, graph: fx.Graph) -> None:
        """Values and side effects are known."""
        keys = ("val", "state", "mutates", "cast_parameters")
        assert all(key in node.meta for node in graph.nodes for key in keys), "propagate first"

    def __call__(self, graph: fx.Graph) -> None:
        """Set `meta["group"]`."""
        # Reads of parameters are not placed: `Place` puts one into each stage that needs it.
        nodes = [node for node in graph.nodes if node.op != "get_attr"]
        order = {node: index for index, node in enumerate(nodes)}
        # A rule yields members of one group. Rules overlap: groups are the connected components
        # of a graph in which each rule's members form a path.
        links = nx.Graph()
        links.add_nodes_from(nodes)
        for members in self._connected(nodes):
            nx.add_path(links, members)
        for component in nx.connected_components(links):
            # A group is named by its first node, so that the name does not depend on set order.
            first = min(component, key=order.__getitem__)
            name = _name(component, first) if len(component) > 1 else None
            for node in component:
                node.meta["group"] = name

    def ensures(self, graph: fx.Graph) -> None:
        """Every node that is placed has been considered."""
        assert all("group" in node.meta for node in graph.nodes if node.op != "get_attr")

    def _connected(self, nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
        """Yield the members that each rule puts together."""
        yield from _ends(nodes)
        yield from _collections(nodes)
        yield from _mutations(nodes)
        yield from _hooks(nodes)
        yield from _gradients(nodes)
        yield from shared_cast_readers(nodes)
        for names in self.together:
            yield [node for node in nodes if any(is_within(node, name) for name in names)]


def _name(component: Iterable[fx.Node], first: fx.Node) -> str:
    if any(node.op == "placeholder" for node in component):
        return INPUTS
    return OUTPUTS if any(node.op == "output" for node in component) else first.name


def _ends(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the inputs with the first operation, and the last one with the output.

    Otherwise a stage could consist of inputs alone, and its rank would have no work.
    """
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs = [node for node in nodes if node.op == "output"]
    operations = [node for node in nodes if node.op not in ("placeholder", "output")]
    yield inputs + operations[:1]
    yield operations[-1:] + outputs


def _collections(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield each node that returns a collection, with its readers: only tensors can be sent."""
    for node in nodes:
        if node.op not in ("placeholder", "output") and not isinstance(node.meta["val"], Tensor):
            yield [node, *(user for user in node.users if user.op != "output")]


def _mutations(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield, by storage, the nodes that touch it up to its last write.

    A copy on another rank would not see the write. Nodes that read the storage later may lie in a
    later stage, since what is sent is what the storage holds when its own stage is through:

        x = a(…)     ┐
        y = x[0]     ├ one group: they touch the storage up to its last write
        x.add_(1)    ┘
        z = b(x)       may lie in a later stage

    Parameters and buffers are not sent. If one is written to, all nodes that touch it stay
    together; those that call a module with it are among them.
    """
    state = _state_storages(nodes)
    touching: dict[int, list[fx.Node]] = {}
    # By storage: how many of the nodes that touch it do so up to its last write.
    group_sizes: dict[int, int] = {}
    for node in nodes:
        written = {storage_key(tensor) for tensor in node.meta["mutates"]}
        for key in _touched_storages(node) | written:
            touching.setdefault(key, []).append(node)
            # A buffer that is written to is never sent, so its
            # readers behind the last write count as well.
            if key in written or (key in group_sizes and key in state):
                group_sizes[key] = len(touching[key])
    yield from (touching[key][:size] for key, size in group_sizes.items())


def _state_storages(nodes: Sequence[fx.Node]) -> set[int]:
    """Return the storages of parameters and buffers that nodes read, themselves or in modules."""
    state = [value for node in nodes for value in node.meta["state"]]
    for node in nodes:
        reads = [source for source in node.all_input_nodes if source.op == "get_attr"]
        state += [source.meta["val"] for source in reads]
    return {storage_key(value) for value in state}


def _touched_storages(node: fx.Node) -> set[int]:
    """Return the storages of what `node` returns, of its arguments and of its module's state."""
    sources = [node, *node.all_input_nodes] if node.op != "output" else node.all_input_nodes
    values = [value for source in sources for value in tensor_leaves(source.meta["val"])]
    return {storage_key(value) for value in (*values, *node.meta["state"])}


def _hooks(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield each hook with its tensor's node: only in that stage is the gradient complete."""
    for node in nodes:
        if node.meta.get("hook"):
            yield [node.all_input_nodes[0], node]


def _gradients(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield what each call of `torch.autograd.grad` in the forward goes back through.

    These are the call itself, its sources, and all nodes on a path from a source to the call.
    """
    for node in nodes:
        if node.target is torch.autograd.grad:
            inputs = node.args[1] if len(node.args) > 1 else node.kwargs["inputs"]
            sources = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, fx.Node)]
            # What lies before the call and behind a source is on a path between them.
            before = _closure(node.all_input_nodes, lambda node: node.all_input_nodes)
            after = _closure(sources, lambda node: node.users)
            members = {node, *sources} | (before & after)
            yield [member for member in nodes if member in members]


def _closure(
    start: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Return all nodes that can be reached from `start`, these included."""
    reached: set[fx.Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(neighbours(node))
    return reached
