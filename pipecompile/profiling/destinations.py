"""Where gradients go while a graph runs backward: to parameters, and to the nodes that a node reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from pipecompile.cost_models.protocol import tensors
from pipecompile.profiling.ledger import Ledger

__all__ = ["Destinations"]

Sources = Mapping[Node | None, Sequence[str]]
"""What a call is given: the names of nodes by the autograd node behind their values."""


class Destinations:
    """By storage of a ledger: the nodes that it is `captured` at, and what is `given` by it.

    It is captured where gradients of parameters branch off the way to a node's inputs: there a split backward holds
    what flows in. Given are pairs of a node and a reader: the gradient that the latter has for the former lies in it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.captured: dict[int, list[str]] = defaultdict(list)
        self.given: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._ledger = ledger
        self._aliases: dict[Node | None, list[tuple[str, str]]] = defaultdict(list)

    def follow(self, name: str, outputs: Iterable[Node], made: Collection[Node], sources: Sources) -> None:
        """Will note what the backward of node `name` does, which made these autograd nodes."""
        for output in set(outputs):
            # One that returns what it was given: who reads it has a gradient for both.
            self._aliases[output] += [(source, name) for source in sources.get(output, ())]
        for node in _branching(made, sources):
            node.register_prehook(partial(self._capture, name))
        for node in made:
            children = {place: child for place, (child, _) in enumerate(node.next_functions) if child in sources}
            pairs = {p: [*((s, name) for s in sources[c]), *self._aliases[c]] for p, c in children.items()}
            if pairs:
                node.register_hook(partial(self._give, pairs))

    def _capture(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        for index in self._ledger.known(tensors(gradients)):
            self.captured[index].append(name)

    def _give(
        self, pairs: Mapping[int, Sequence[tuple[str, str]]], gradients: Sequence[Tensor | None], _: object
    ) -> None:
        for place, own in pairs.items():
            for index in self._ledger.known(tensors(gradients[place])):
                self.given[index] += own


def _branching(made: Iterable[Node], sources: Sources) -> Iterator[Node]:
    """Of the autograd nodes that one call made, those that lead to what it was given and to parameters besides.

    None of custom Functions, which make all of their gradients at once (runtime/halves.py).
    """
    on_the_way: set[Node | None] = set(sources)
    for node in sorted(made, key=_age):
        children = {child for child, _ in node.next_functions if child is not None}
        if not on_the_way.isdisjoint(children):
            on_the_way.add(node)
            if not on_the_way.issuperset(children) and not isinstance(node, BackwardCFunction):
                yield node


def _age(node: Node) -> int:
    """Nodes that lead to others are younger than these; what accumulates gradients leads nowhere, and counts as old."""
    return node._sequence_nr() if node.next_functions else -1
