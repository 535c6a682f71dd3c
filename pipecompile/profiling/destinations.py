"""Where gradients go while a graph runs backward: to parameters, and to the nodes that a node reads."""

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

__all__ = ["GradientDestinations"]

Sources = Mapping[Node | None, Sequence[str]]
"""What a call is given: the names of nodes by the autograd node behind their values."""
Strides = tuple[tuple[int, int], ...]


class GradientDestinations:
    """By storage of a ledger: the nodes that it is `captured` at, and what is `given` by it.

    It is captured where gradients of parameters branch off the way to a node's inputs, or those of several inputs,
    which may lead to parameters: there a split backward holds what flows in. Given are pairs of a node and a
    reader: the gradient that the latter has for the former lies in it, with the strides of the former's value or as a
    part.
    By node `readers` are those that give a gradient at all, `expanded` the pairs whose gradient repeats elements, and
    `given_as_views` the parameters, by id, whose gradients a node gives as views: nothing is added to these in place.
    `early` are those whose gradients a first half of a backward makes, since they hang off several autograd nodes on
    the way to the node's inputs, or off a custom Function (runtime/split_backward.py).
    """

    def __init__(self, ledger: StorageTracker) -> None:
        self.captured: dict[int, list[str]] = defaultdict(list)
        self.given: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self.readers: dict[str, set[str]] = defaultdict(set)
        self.expanded: set[tuple[str, str]] = set()
        self.given_as_views: dict[str, list[int]] = defaultdict(list)
        self.early: dict[str, list[int]] = {}
        self._ledger = ledger
        self._strides: dict[str, Strides] = {}
        self._hooks: list[RemovableHandle] = []
        self._aliases: dict[Node | None, list[tuple[str, str]]] = defaultdict(list)

    def follow(
        self, name: str, values: Sequence[Tensor], made: Collection[Node], sources: Sources
    ) -> None:
        """Will note what the backward of node `name` does, which gave these values and made these autograd nodes."""
        if len(values) == 1:
            self._strides[name] = _strides(values[0])
        for output in {value.grad_fn for value in values if value.grad_fn is not None}:
            # One that returns what it was given: who reads it has a gradient for both.
            self._aliases[output] += [(source, name) for source in sources.get(output, ())]
        reached = _reached(made, sources)
        self.early[name] = list(_early(made, reached))
        self._hooks += [
            node.register_prehook(partial(self._capture, name))
            for node in _branching(made, reached)
        ]
        for node in made:
            children = {
                place: child
                for place, (child, _) in enumerate(node.next_functions)
                if child in sources
            }
            pairs = {
                p: [*((s, name) for s in sources[c]), *self._aliases[c]]
                for p, c in children.items()
            }
            if pairs:
                self._hooks.append(node.register_hook(partial(self._give, pairs)))
            leaves = {
                place: getattr(child, "variable", None)
                for place, (child, _) in enumerate(node.next_functions)
            }
            parameters = {place: id(leaf) for place, leaf in leaves.items() if leaf is not None}
            if parameters:
                self._hooks.append(node.register_hook(partial(self._give_views, name, parameters)))

    def leave(self) -> None:
        """Takes all hooks away: what they refer to, which no collector finds, would live for ever."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._aliases.clear()

    def _capture(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        for index in self._ledger.known(tensor_leaves(gradients)):
            self.captured[index].append(name)

    def _give_views(
        self,
        name: str,
        parameters: Mapping[int, int],
        gradients: Sequence[Tensor | None],
        _: object,
    ) -> None:
        for place, parameter in parameters.items():
            gradient = gradients[place]
            if gradient is not None and gradient._is_view():
                self.given_as_views[name].append(parameter)

    def _give(
        self,
        pairs: Mapping[int, Sequence[tuple[str, str]]],
        gradients: Sequence[Tensor | None],
        _: object,
    ) -> None:
        for place, own in pairs.items():
            gradient = gradients[place]
            for source, reader in own if gradient is not None else ():
                self.readers[source].add(reader)
            if any(stride == 0 for each in tensor_leaves(gradient) for _, stride in _strides(each)):
                self.expanded.update(own)
            for index in self._ledger.known(tensor_leaves(gradient)):
                assert gradient is not None
                is_part = self._ledger.lives[index].bytes > size_bytes([gradient])
                self.given[index] += [
                    (source, reader)
                    for source, reader in own
                    if source in self._strides
                    and (is_part or self._strides[source] == _strides(gradient))
                ]


def _strides(value: Tensor) -> Strides:
    """Of the dimensions along which there is more than one element."""
    return tuple(
        (size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1
    )


def _reached(made: Iterable[Node], sources: Sources) -> dict[Node, set[Node | None]]:
    """Of the autograd nodes that one call made, those on the way to what it was given, with what of that they reach."""
    reached: dict[Node | None, set[Node | None]] = {source: {source} for source in sources}
    for node in sorted(made, key=_age):
        ways = [reached[child] for child in _children(node) if child in reached]
        if ways:
            reached[node] = set().union(*ways)
    return {node: ends for node, ends in reached.items() if node is not None}


def _branching(made: Iterable[Node], reached: Mapping[Node, set[Node | None]]) -> Iterator[Node]:
    """Where parameters branch off the way to what a call was given, or several ways.

    None of custom Functions, which make all of their gradients at once (runtime/split_backward.py).
    """
    for node in made:
        children = _children(node)
        if node in reached and not isinstance(node, BackwardCFunction):
            ways = len(children & reached.keys())
            if ways < len(children) or (ways > 1 and len(reached[node]) > 1):
                yield node


def _early(made: Iterable[Node], reached: Mapping[Node, set[Node | None]]) -> Iterator[int]:
    """The parameters, by id, that hang off several of these nodes on the way, or off a custom Function."""
    begins: dict[Node, set[Node | None]] = defaultdict(set)
    for node in sorted(made, key=_age, reverse=True):
        is_custom = isinstance(node, BackwardCFunction)
        own: set[Node | None] = (
            ({None, node} if is_custom else {node}) if node in reached else begins[node]
        )
        for child in _children(node) - reached.keys():
            begins[child] |= own
    for node, ways in begins.items():
        leaf = getattr(node, "variable", None)
        if leaf is not None and len(ways) > 1:
            yield id(leaf)


def _children(node: Node) -> set[Node]:
    return {child for child, _ in node.next_functions if child is not None}


def _age(node: Node) -> int:
    """Nodes that lead to others are younger than these; what accumulates gradients leads nowhere, and counts as old."""
    return node._sequence_nr() if node.next_functions else -1
