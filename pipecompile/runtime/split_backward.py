"""The backward in two halves: first the gradients that the stage before waits for, later those of the parameters.

The first half runs along the paths from the outputs to the inputs. Parameters hang off these paths, and what flows
into the nodes that they hang off is kept: there the second half begins.

    outputs ── a ── b ── inputs      first half    a and b, for the gradients of the inputs alone
               │    │
               v    w                second half   a for the gradient of v, b for that of w

All of a parameter's gradient is made in one half, and is therefore summed as a whole backward sums it. Three kinds of
parameters do not hang off one node:

    met by no path                            second half, from the outputs
    hanging off several nodes                 first half: a later walk would pass the lower nodes again
    hanging off a custom autograd Function    first half: a Function makes all of its gradients at once

The gradients of the latter two are added to `.grad` in the second half like all others. Each call of autograd walks
the graph below where it begins, so the second half's bookkeeping grows with the square of a stage's nodes; that of
torch.distributed.pipelining grows alike, and it fails on a reused module that meets a branch without gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["TiedGradients", "BackwardPart", "first_half", "second_half"]

TiedGradients = dict[Tensor, Tensor]
_FIRST_HALF, _OUTPUTS = object(), object()  # where gradients begin, beside nodes


@dataclass
class BackwardPart:
    """Where the second half begins for some parameters (None: for all that are reached), and what flows in there."""

    edges: Sequence[GradientEdge]
    gradients: Sequence[Tensor | None]
    parameters: Sequence[Tensor] | None = None
    # Whether other parts need what this one runs through.
    shares: bool = False

    @staticmethod
    def at(tensors: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> BackwardPart:
        """Beginning at `tensors`, for all parameters."""
        return BackwardPart([get_gradient_edge(value) for value in tensors], gradients)

    def run(self, carried: TiedGradients) -> None:
        """Adds to `.grad`; what is `carried` here from later stages is the first summand, as in a whole backward."""
        own = carried if self.parameters is None else [p for p in self.parameters if p in carried]
        added = {parameter: carried.pop(parameter) for parameter in list(own)}
        edges, gradients = (
            [*self.edges, *map(get_gradient_edge, added)],
            [*self.gradients, *added.values()],
        )
        if edges:
            torch.autograd.backward(
                edges, gradients, retain_graph=self.shares, inputs=self.parameters
            )


def first_half(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    gathered: Collection[Tensor] = (),
) -> tuple[list[Tensor | None], list[BackwardPart]]:
    """The gradients of `inputs`, which are leaves, and what the second half needs.

    `gathered` are parameters to which later stages contribute: such a gradient is made at once from all summands.
    """
    if not inputs or not outputs:
        return [None] * len(inputs), [BackwardPart.at(outputs, gradients)]
    roots, leaves = (list(map(get_gradient_edge, values)) for values in (outputs, inputs))
    graph = _BackwardGraph(roots)
    groups = _groups(graph, {edge.node for edge in leaves}, gathered)
    nodes = [node for node in graph.order if node in groups]
    begins = [
        (groups[n], [GradientEdge(n, index) for index in sorted(graph.used[n])]) for n in nodes
    ]
    if early := groups.get(_FIRST_HALF):
        begins.append((early, list(map(get_gradient_edge, early))))
    # An edge into a node that runs is captured before its hooks: they run in each half, on the same gradient.
    wanted = [*leaves, *(edge for _, edges in begins for edge in edges)]
    found = iter(
        torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    )
    given: list[Tensor | None] = list(islice(found, len(leaves)))
    parts = [BackwardPart(roots, gradients, groups[_OUTPUTS], shares=True)] if _OUTPUTS in groups else []
    parts += [
        _part(edges, list(islice(found, len(edges))), parameters) for parameters, edges in begins
    ]
    return given, parts


def second_half(parts: list[BackwardPart], carried: TiedGradients) -> None:
    """Adds to the parameters' `.grad`. Consumes `parts`, from the outputs down, so that memory is freed on the way."""
    parts.reverse()
    while parts:
        part = parts.pop()
        part.run(carried)
    BackwardPart((), ()).run(carried)


def _part(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> BackwardPart:
    """Without the edges through which nothing flows."""
    pairs = [pair for pair in zip(edges, gradients, strict=True) if pair[1] is not None]
    return BackwardPart([edge for edge, _ in pairs], [gradient for _, gradient in pairs], parameters)


class _BackwardGraph:
    """The nodes that `edges` lead to, each after all that lead to it, and which outputs of each are used."""

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.roots = [edge.node for edge in edges]
        self.children: dict[Node, list[Node]] = {}
        self.used: dict[Node, set[int]] = {edge.node: set() for edge in edges}
        for edge in edges:
            self.used[edge.node].add(edge.output_nr)
        self.order = self._walk()

    def _walk(self) -> list[Node]:
        left: list[Node] = []
        stack = [(node, False) for node in self.roots]
        while stack:
            node, done = stack.pop()
            if done:
                left.append(node)
            elif node not in self.children:
                stack.append((node, True))
                stack += [(child, False) for child in self._enter(node)]
        return left[::-1]

    def _enter(self, node: Node) -> list[Node]:
        edges = [(child, index) for child, index in node.next_functions if child is not None]
        for child, index in edges:
            self.used.setdefault(child, set()).add(index)
        self.children[node] = [child for child, _ in edges]
        return self.children[node]

    def leading_to(self, ends: Collection[Node]) -> set[Node]:
        """The nodes on paths to `ends`, these included."""
        found: set[Node] = set()
        for node in reversed(self.order):
            if node in ends or not found.isdisjoint(self.children[node]):
                found.add(node)
        return found


def _groups(
    graph: _BackwardGraph, inputs: Collection[Node], gathered: Collection[Tensor]
) -> dict[object, list[Tensor]]:
    """The parameters by where the second half begins for them."""
    path = graph.leading_to(inputs)
    begins: dict[Node, object] = dict.fromkeys(graph.roots, _OUTPUTS)
    groups: dict[object, list[Tensor]] = {}
    for node in graph.order:
        begin = begins[node]
        if node in path:
            begin = _FIRST_HALF if isinstance(node, BackwardCFunction) else node
        elif (parameter := getattr(node, "variable", None)) is not None and not graph.children[
            node
        ]:
            groups.setdefault(_settled(begin, parameter, gathered), []).append(parameter)
        for child in graph.children[node]:
            begins[child] = begin if begins.get(child, begin) is begin else _FIRST_HALF
    return groups


def _settled(begin: object, parameter: Tensor, gathered: Collection[Tensor]) -> object:
    # A gradient that was made in the first half would meet the parameter's hooks, and other summands, a second time.
    whole = parameter._backward_hooks or any(parameter is other for other in gathered)
    return _OUTPUTS if begin is _FIRST_HALF and whole else begin
