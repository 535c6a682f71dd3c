"""The split backward: first the gradients that the stage before waits for, then the parameters'.

The input backward runs along the paths from the outputs to the inputs. Parameters branch off these
paths. The gradients that flow into a node from which parameters branch off are kept, and the weight
backward begins there:

    outputs ── a ── b ── inputs      input backward    a and b, only for gradients of the inputs
               │    │
               v    w                weight backward   a for the gradient of v, b for that of w

All of a parameter's gradient is computed in one half, and is therefore summed as a whole backward
sums it. Four kinds of parameters are no such branch:

    reached by no path to the inputs             weight backward, from the outputs
    branching off several nodes                  input backward: a later walk would pass the lower
                                                 nodes a second time
    branching off a custom autograd Function     input backward: a Function computes all of its
    or a GroupNorm                               gradients at once
    below a tensor with a hook                   input backward: a hook may count, or keep what it
                                                 sees, and would run in each half; not so if the
                                                 parameter has a hook, see `_final_begin`

The weight backward adds the gradients of the last three kinds to `.grad`, like all others. Each
call of autograd walks the graph below its begin, so the bookkeeping of the weight backward grows
with the square of a stage's nodes. That of torch.distributed.pipelining (`_backward.py`) grows
alike, and it fails on a reused module one of whose branches has no gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,
)

from pipecompile.graph.gradient_hooks import gradient_edge, has_noted_hook

__all__ = ["BackwardPart", "TiedGradients", "input_backward", "weight_backward"]

TiedGradients = dict[Tensor, Tensor]
"""Gradients of tied parameters for one microbatch, on their way to earlier stages."""

_WITH_INPUTS = frozenset({"NativeGroupNormBackward0"})
"""Operators whose kernels need the gradient of their input asked: on a CPU torch's own for
channels_last ends the process without it."""

# Where the weight backward begins for a parameter is a node of the graph, or one of these.
_INPUT_BACKWARD, _OUTPUTS = object(), object()


@dataclass(slots=True)
class BackwardPart:
    """One begin of the weight backward, for some parameters; also a whole backward.

    `edges` are where it begins, or tensors there, and `gradients` what flows in. `parameters` are
    those whose gradients it computes; None stands for all that it reaches. `shares_graph` says
    whether other parts still need the nodes that this one runs through.
    """

    edges: Sequence[GradientEdge] | Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    parameters: Sequence[Tensor] | None = None
    shares_graph: bool = False

    def run(self, tied_gradients: TiedGradients) -> None:
        """Add gradients to the parameters' `.grad`, and consume those of `tied_gradients`.

        The contribution of later stages to a tied parameter is the first summand, as it is in a
        backward of the unsplit model.
        """
        edges, gradients = self.edges, self.gradients
        if tied_gradients:
            from_later = self._pop_reached(tied_gradients)
            edges = [*edges, *map(gradient_edge, from_later)]
            gradients = [*gradients, *from_later.values()]
        if self.parameters is None and all(type(each) is Tensor for each in edges):
            self._run_whole(edges, gradients)
        elif edges:
            torch.autograd.backward(
                edges, gradients, retain_graph=self.shares_graph, inputs=self.parameters
            )

    def _run_whole(self, roots: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Do what `torch.autograd.backward` does for plain tensors, without the questions that it
        asks for others: these take longer than a small layer.
        """
        seeds = [
            torch.ones_like(root) if gradient is None else gradient
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        if roots:
            _engine_run_backward(
                tuple(roots),
                tuple(seeds),
                self.shares_graph,
                False,  # no graph of the backward
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _pop_reached(self, tied_gradients: TiedGradients) -> TiedGradients:
        """Remove and return the gradients of the parameters that this part reaches."""
        reached = list(tied_gradients)
        if self.parameters is not None:
            reached = [p for p in self.parameters if p in tied_gradients]
        return {parameter: tied_gradients.pop(parameter) for parameter in reached}


def input_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    tied_to_later: Collection[Tensor] = (),
) -> tuple[list[Tensor | None], list[BackwardPart]]:
    """Return the gradients of `inputs`, which are leaves, and the parts of the weight backward.

    `gradients` are those of `outputs`. `tied_to_later` are parameters to which later stages
    contribute: their gradients are not computed early, but at once from all summands.
    """
    if not inputs or not outputs:
        # Edges, since the weight backward needs no outputs.
        edges = [gradient_edge(value) for value in outputs]
        return [None] * len(inputs), [BackwardPart(edges, gradients)]
    roots = list(map(gradient_edge, outputs))
    leaves = list(map(gradient_edge, inputs))
    graph = _BackwardGraph(roots)
    groups = _parameters_by_begin(graph, {edge.node for edge in leaves}, tied_to_later)
    # Parts run in the order of the graph, from the outputs down.
    begins = [
        (groups[node], [GradientEdge(node, index) for index in sorted(graph.used_outputs[node])])
        for node in graph.order
        if node in groups
    ]
    if early := groups.get(_INPUT_BACKWARD):
        # The begin of these is the parameter itself: only adding to `.grad` is left.
        begins.append((early, list(map(gradient_edge, early))))
    # For a stage of two linears, x ─ a ─ b ─ y, these are sought: the gradient of x, what flows
    # into b, and what flows into a. Later, one part begins at b and computes b's weight, the
    # other one at a and computes a's: neither runs through a path to x once more.
    # One call computes everything. What flows into an edge is captured before the hooks of its
    # node run: those that are not noted run in each half, on the same gradient.
    sought = [*leaves, *(edge for _, edges in begins for edge in edges)]
    captured = iter(
        # The graph is retained because the parts walk through its nodes again; each frees what it
        # has used.
        torch.autograd.grad(roots, sought, gradients, retain_graph=True, allow_unused=True)
    )
    input_gradients: list[Tensor | None] = list(islice(captured, len(leaves)))
    parts: list[BackwardPart] = []
    if _OUTPUTS in groups:
        parts.append(BackwardPart(roots, gradients, groups[_OUTPUTS], shares_graph=True))
    for parameters, edges in begins:
        parts.append(_part(edges, list(islice(captured, len(edges))), parameters))
    return input_gradients, parts


def weight_backward(parts: list[BackwardPart], tied_gradients: TiedGradients) -> None:
    """Add to the parameters' `.grad`.

    `parts` run from the outputs down and are removed one by one, so that memory is freed on the
    way. `tied_gradients` is consumed.
    """
    parts.reverse()
    while parts:
        part = parts.pop()
        part.run(tied_gradients)
    BackwardPart((), ()).run(tied_gradients)  # of parameters that no part has reached


def _part(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> BackwardPart:
    """Return a part without the edges into which no gradient flows."""
    pairs = [pair for pair in zip(edges, gradients, strict=True) if pair[1] is not None]
    return BackwardPart(
        [edge for edge, _ in pairs], [gradient for _, gradient in pairs], parameters
    )


class _BackwardGraph:
    """The autograd nodes below some edges.

    `order` has each node after all nodes that lead to it. `used_outputs` has by node the indices of
    its outputs that edges lead to, and `children` the nodes that it leads to itself.
    """

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.roots = [edge.node for edge in edges]
        self.children: dict[Node, list[Node]] = {}
        self.used_outputs: dict[Node, set[int]] = {edge.node: set() for edge in edges}
        for edge in edges:
            self.used_outputs[edge.node].add(edge.output_nr)
        self.order = self._topological_order()

    def _topological_order(self) -> list[Node]:
        """Return all nodes by a depth-first walk; no recursion, since graphs are deep."""
        finished: list[Node] = []
        stack = [(node, False) for node in self.roots]
        while stack:
            node, is_finished = stack.pop()
            if is_finished:
                finished.append(node)
            elif node not in self.children:
                stack.append((node, True))
                stack += [(child, False) for child in self._enter(node)]
        return finished[::-1]

    def _enter(self, node: Node) -> list[Node]:
        edges = [(child, index) for child, index in node.next_functions if child is not None]
        for child, index in edges:
            self.used_outputs.setdefault(child, set()).add(index)
        self.children[node] = [child for child, _ in edges]
        return self.children[node]

    def nodes_on_paths_to(self, ends: Collection[Node]) -> set[Node]:
        """Return the nodes on paths to `ends`, with the ends."""
        on_path: set[Node] = set()
        for node in reversed(self.order):
            if node in ends or not on_path.isdisjoint(self.children[node]):
                on_path.add(node)
        return on_path


def _parameters_by_begin(
    graph: _BackwardGraph, inputs: Collection[Node], tied_to_later: Collection[Tensor]
) -> dict[object, list[Tensor]]:
    """Return the parameters by where the weight backward begins for them.

    Begins flow down the graph, from each node to its children. A node on a path to the inputs is
    its own begin. Off the path a node has the begin of its parents; where these differ, the input
    backward has to compute the gradient:

        outputs ── a ── b ── inputs      v branches off a           begin a
                   │    │                w branches off b           begin b
                   ├─ u ┤                u branches off a and b     begin _INPUT_BACKWARD
                   v    w
    """
    path = graph.nodes_on_paths_to(inputs)
    begins: dict[Node, object] = dict.fromkeys(graph.roots, _OUTPUTS)
    groups: dict[object, list[Tensor]] = {}
    for node in graph.order:
        begin = begins[node]
        parameter = getattr(node, "variable", None)
        if node in path:
            begin = _INPUT_BACKWARD if _computes_all_at_once(node) else node
        elif parameter is not None and not graph.children[node]:
            final = _final_begin(begin, parameter, tied_to_later)
            groups.setdefault(final, []).append(parameter)
        for child in graph.children[node]:
            begins[child] = begin if begins.get(child, begin) is begin else _INPUT_BACKWARD
    return groups


def _computes_all_at_once(node: Node) -> bool:
    """Return whether the gradients of a node's parameters come with that of its input."""
    is_one = isinstance(node, BackwardCFunction) or node.name() in _WITH_INPUTS
    return is_one or has_noted_hook(node)


def _final_begin(begin: object, parameter: Tensor, tied_to_later: Collection[Tensor]) -> object:
    """Return `begin`, or the outputs for a parameter whose gradient must not be computed early.

    In the weight backward an early gradient would meet the parameter's hooks, and the summands of
    other stages, a second time.
    """
    needs_one_pass = parameter._backward_hooks or any(p is parameter for p in tied_to_later)
    return _OUTPUTS if begin is _INPUT_BACKWARD and needs_one_pass else begin
