"""Where gradients go in a backward: to parameters, and to the nodes that a node reads.

The observer of a step learns from it what a split backward holds, and what stages send to each
other. Hooks on autograd nodes see each gradient as it is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import size_bytes
from pipecompile.profiling.storage_tracker import StorageTracker

__all__ = ["GradientDestinations", "Sources"]

Sources = Mapping[Node | None, Sequence[str]]
"""By autograd node the names of those nodes of the graph, read by a call, whose values it made."""
Edge = tuple[str, str]
"""A node of the graph and a reader of its value, by their names."""
SizedStrides = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension with more than one element."""


class GradientDestinations:
    """What the backward of each node does with gradients. All results are by name unless said.

        `captured_at`        by index of a storage of the tracker, the nodes of the graph at which a
                             split backward holds it until its weight backward
        `edges`              by index of a storage, the edges whose gradient lies in it: with the
                             strides of the node's value, or as a part of the storage
        `readers`            the readers that give a node a gradient at all
        `expanded_edges`     the edges whose gradient repeats elements
        `view_gradients`     parameters, by id, whose gradients a node gives as views: autograd adds
                             nothing to these in place
        `gradients_by_input_backward`
                             parameters, by id, whose gradients the input backward computes
                             (runtime/split_backward.py)
        `ordered`            the nodes that give several gradients for one tensor (`h * h`), or one
                             that lies in memory otherwise than the tensor

    A gradient is captured where parameters branch off the way from a node's value to its inputs. It
    is captured too where the ways to several inputs branch, since these may lead to parameters.
    """

    def __init__(self, tracker: StorageTracker) -> None:
        self.captured_at: dict[int, list[str]] = defaultdict(list)
        self.edges: dict[int, list[Edge]] = defaultdict(list)
        self.readers: dict[str, set[str]] = defaultdict(set)
        self.expanded_edges: set[Edge] = set()
        self.view_gradients: dict[str, list[int]] = defaultdict(list)
        self.gradients_by_input_backward: dict[str, list[int]] = {}
        self.ordered: set[str] = set()
        self._tracker = tracker
        self._value_strides: dict[str, SizedStrides] = {}
        self._hooks: list[RemovableHandle] = []
        # By autograd node the further edges that its gradient is for, see `follow`.
        self._aliases: dict[Node | None, list[Edge]] = defaultdict(list)

    def follow(
        self,
        name: str,
        values: Sequence[Tensor],
        autograd_nodes: Collection[Node],
        sources: Sources,
    ) -> None:
        """Set hooks on the autograd nodes of node `name`, which returned `values`."""
        if len(values) == 1:
            self._value_strides[name] = _sized_strides(values[0])
        for output in {value.grad_fn for value in values if value.grad_fn is not None}:
            # A node that returns its input has no autograd node of its own: the gradient of its
            # readers is also the one that it gives to its input.
            self._aliases[output] += [(source, name) for source in sources.get(output, ())]
        if _has_repeated_end(autograd_nodes):
            self.ordered.add(name)
        reached = _reached_sources(autograd_nodes, sources)
        self.gradients_by_input_backward[name] = list(_early_parameters(autograd_nodes, reached))
        for node in _branching(autograd_nodes, reached):
            # A prehook sees what comes into an autograd node, and a hook what the node returns.
            self._hooks.append(node.register_prehook(partial(self._note_captured, name)))
        for node in autograd_nodes:
            edges = self._edges_of(node, name, sources)
            if edges:
                self._hooks.append(node.register_hook(partial(self._note_given, edges)))
            parameters = _parameters_of(node)
            if parameters:
                hook = partial(self._note_views, name, parameters)
                self._hooks.append(node.register_hook(hook))

    def remove_hooks(self) -> None:
        """Remove all hooks: no garbage collector finds their references, so these would stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._aliases.clear()

    def _edges_of(self, node: Node, name: str, sources: Sources) -> dict[int, list[Edge]]:
        """Return, by index of a gradient that `node` returns, the edges that it is for."""
        edges: dict[int, list[Edge]] = {}
        for index, (child, _) in enumerate(node.next_functions):
            if child in sources:
                edges[index] = [(source, name) for source in sources[child]]
                edges[index] += self._aliases[child]
        return edges

    def _note_captured(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        for storage in self._tracker.tracked(tensor_leaves(gradients)):
            self.captured_at[storage].append(name)

    def _note_views(
        self,
        name: str,
        parameters: Mapping[int, int],
        gradients: Sequence[Tensor | None],
        _: object,
    ) -> None:
        for index, parameter in parameters.items():
            gradient = gradients[index]
            if gradient is not None and gradient._is_view():
                self.view_gradients[name].append(parameter)

    def _note_given(
        self,
        edges_by_index: Mapping[int, Sequence[Edge]],
        gradients: Sequence[Tensor | None],
        _: object,
    ) -> None:
        for index, edges in edges_by_index.items():
            gradient = gradients[index]
            if gradient is not None:
                self._note_gradient(gradient, edges)

    def _note_gradient(self, gradient: Tensor, edges: Sequence[Edge]) -> None:
        for source, reader in edges:
            self.readers[source].add(reader)
        strides = _sized_strides(gradient)
        if any(stride == 0 for _, stride in strides):
            self.expanded_edges.update(edges)
        for source, reader in edges:
            if self._value_strides.get(source, strides) != strides:
                self.ordered.add(reader)
        for storage in self._tracker.tracked([gradient]):
            is_part = self._tracker.live_ranges[storage].bytes > size_bytes([gradient])
            for source, reader in edges:
                # Nodes with several values have no strides; their gradients are not sent.
                if source in self._value_strides and (
                    is_part or self._value_strides[source] == strides
                ):
                    self.edges[storage].append((source, reader))


def _parameters_of(node: Node) -> dict[int, int]:
    """Return, by index of a gradient that `node` returns, the id of the leaf that it is for."""
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
    return {index: id(leaf) for index, leaf in enumerate(leaves) if leaf is not None}


def _has_repeated_end(autograd_nodes: Collection[Node]) -> bool:
    """Return whether the autograd nodes of a call give several gradients for one tensor that is not
    of the call.
    """
    inside = set(autograd_nodes)
    edges = (edge for node in autograd_nodes for edge in node.next_functions)
    ends = [edge for edge in edges if edge[0] is not None and edge[0] not in inside]
    return len(set(ends)) < len(ends)


def _sized_strides(value: Tensor) -> SizedStrides:
    """Return size and stride of the dimensions with more than one element; others are arbitrary."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return tuple((size, stride) for size, stride in pairs if size > 1)


def _reached_sources(
    autograd_nodes: Iterable[Node], sources: Sources
) -> dict[Node, set[Node | None]]:
    """Return, for autograd nodes of one call, which of its sources they lead to.

    Nodes that lead to none are left out. For y = relu(x @ w) with x and w from sources and
    parameters, Relu and Mm lead to x, and the node that accumulates into w to none.
    """
    reached: dict[Node | None, set[Node | None]] = {source: {source} for source in sources}
    # Autograd numbers nodes as they are made, so what a node leads to has a
    # smaller number than the node itself: in this order all children come first.
    for node in sorted(autograd_nodes, key=_age):
        of_children = [reached[child] for child in _children(node) if child in reached]
        if of_children:
            reached[node] = set().union(*of_children)
    return {node: ends for node, ends in reached.items() if node is not None}


def _branching(
    autograd_nodes: Iterable[Node], reached: Mapping[Node, set[Node | None]]
) -> Iterator[Node]:
    """Yield the nodes at which parameters, or the ways to several sources, branch off.

    Custom Functions are left out: they compute all of their gradients at once.
    """
    for node in autograd_nodes:
        if node not in reached or isinstance(node, BackwardCFunction):
            continue
        children = _children(node)
        leading = children & reached.keys()
        has_parameters = len(leading) < len(children)
        if has_parameters or (len(leading) > 1 and len(reached[node]) > 1):
            yield node


def _early_parameters(
    autograd_nodes: Iterable[Node], reached: Mapping[Node, set[Node | None]]
) -> Iterator[int]:
    """Yield the parameters, by id, whose gradients the input backward computes.

    They branch off several nodes on the way to the sources, or off a custom Function. This is the
    rule of `_parameters_by_begin` in runtime/split_backward.py.
    """
    begins: dict[Node, set[Node | None]] = defaultdict(set)
    # The other way round: from the outputs on, so that a node knows all begins above it.
    for node in sorted(autograd_nodes, key=_age, reverse=True):
        own: set[Node | None] = {node}
        if node not in reached:
            own = begins[node]
        elif isinstance(node, BackwardCFunction):
            own = {None, node}  # two begins, so that its parameters count as early
        for child in _children(node) - reached.keys():
            begins[child] |= own
    for node, nodes in begins.items():
        leaf = getattr(node, "variable", None)
        if leaf is not None and len(nodes) > 1:
            yield id(leaf)


def _children(node: Node) -> set[Node]:
    return {child for child, _ in node.next_functions if child is not None}


def _age(node: Node) -> int:
    """Return a number that grows from a node to the nodes that lead to it.

    Nodes that accumulate gradients lead nowhere and come first.
    """
    return node._sequence_nr() if node.next_functions else -1
