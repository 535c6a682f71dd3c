"""Costs that are given: by a cost graph in a file, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from torch import fx

from pipecompile.cost_models.protocol import CallCost, NodeCall
from pipecompile.errors import InputError, StaleProfileError
from pipecompile.ir.graph import FUSED_ATTENTION, CostGraph, FusedType, Node
from pipecompile.ir.serialization import read

__all__ = ["CostFunction", "Function", "Table"]

CostFunction = Callable[[fx.Node, NodeCall], int | CallCost]
"""From a node, and its call on fake tensors, to its forward in nanoseconds or to all its times."""


@dataclass(frozen=True)
class Table:
    """The times and the scratch of `graph`, by names of nodes.

    Other sizes come from the model, held as the graph says. A backward that the graph does not split counts half for
    the inputs and half for the parameters.
    """

    graph: CostGraph
    name: str = "table"
    real: ClassVar[bool] = False

    @property
    def memory(self) -> Literal["cpu", "cuda"]:
        """As the graph has it."""
        return self.graph.allocator

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """As the graph has it."""
        return self.graph.fused_attention

    @classmethod
    def of(cls, path: str) -> Table:
        """The times in the cost graph at `path`; FormatError if it is none."""
        return cls(read(Path(path), CostGraph), f"table:{path}")

    def check(self, fingerprint: str, nodes: Iterable[str]) -> None:
        """StaleProfileError unless the graph was made for the captured graph of this fingerprint and these nodes."""
        known = self.graph.fingerprint
        if known and known != fingerprint:
            raise StaleProfileError(
                f"{self.name} was made for another graph ({known[:12]}…) than this model has with these inputs "
                f"({fingerprint[:12]}…); profile again, or bring back the model, its mode and its shapes"
            )
        different = sorted(set(nodes) ^ self.graph.by_name.keys())
        if different:
            owner = self.name if different[0] in self.graph.by_name else "the model"
            raise StaleProfileError(
                f"{self.name} and the model have different nodes: only {owner} has {different[0]!r}; profile again"
            )

    def cost(self, call: NodeCall) -> CallCost:
        """What the node of that name costs; InputError if there is none."""
        if call.node.name not in self.graph.by_name:
            raise InputError(
                f"{self.name} has no node {call.node.name!r}; it is of another model, profile again"
            )
        node = self.graph.by_name[call.node.name]
        inputs, weights = _halves(node)
        # A graph from elsewhere may leave scratch out, which then reads as 0.
        scratch = node.workspace_bytes if self.graph.fingerprint else node.workspace_bytes or None
        return CallCost(node.forward_ns, node.backward_ns, inputs, weights, scratch)

    def finished(self, graph: CostGraph) -> CostGraph:
        """`graph` with what a step takes once as the table's nodes of the same names have it."""
        known = self.graph.by_name
        nodes = (
            msgspec.structs.replace(node, per_step_ns=known[node.name].per_step_ns)
            for node in graph.nodes
        )
        return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _halves(node: Node) -> tuple[int, int]:
    half = -(-node.backward_ns // 2)
    return (
        half if node.backward_input_ns is None else node.backward_input_ns,
        half if node.backward_weight_ns is None else node.backward_weight_ns,
    )


@dataclass(frozen=True)
class Function:
    """Asks a function of the user's, GPipe's c_i (arXiv 1811.06965, section 2.2).

    From a forward time alone: the whole backward takes twice as long, each of its halves as long as the forward.
    """

    function: CostFunction
    name: ClassVar[str] = "function"
    real: ClassVar[bool] = False
    memory: ClassVar[Literal["cuda"]] = "cuda"
    fused_attention: ClassVar[tuple[FusedType, ...]] = FUSED_ATTENTION

    def cost(self, call: NodeCall) -> CallCost:
        """What the function says; InputError if it is neither whole nanoseconds nor a CallCost of such."""
        given = self.function(call.node, call)
        if not all(map(_is_whole, _figures(given))):
            raise InputError(
                f"the cost function gave {given!r} for node {call.node.name!r}; "
                "it must give the forward in whole nanoseconds, or a CallCost of whole nanoseconds and bytes"
            )
        return given if isinstance(given, CallCost) else CallCost(given, 2 * given, given, given)


def _figures(given: object) -> Sequence[object]:
    if not isinstance(given, CallCost):
        return [given]
    *times, scratch = astuple(given)
    return times if scratch is None else [*times, scratch]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
