"""The cost models `table:FILE`, a cost graph in a file, and a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
from torch import fx

from pipecompile.cost_models.protocol import CallCost, NodeCall
from pipecompile.errors import InputError, StaleProfileError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FUSED_ATTENTION, CostGraph, FusedType, Node, TimeUnit
from pipecompile.ir.serialization import read

__all__ = ["CostFunction", "Function", "Table"]

CostFunction = Callable[[fx.Node, NodeCall], int | CallCost]
"""From a node and its call on fake tensors to its forward in ns, or to its whole cost."""


@dataclass(frozen=True)
class Table:
    """The times and the kernel workspace of `graph`, by the names of nodes.

    Other sizes come from the model. A backward that the graph does not split counts half for the
    inputs and half for the parameters.
    """

    graph: CostGraph
    name: str = "table"
    real: ClassVar[bool] = False
    reproducible: ClassVar[bool] = True
    by_signature: ClassVar[bool] = False

    @property
    def time_unit(self) -> TimeUnit:
        """As in the graph."""
        return self.graph.time_unit

    @property
    def allocator(self) -> AllocatorName:
        """As in the graph."""
        return self.graph.allocator

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """As in the graph."""
        return self.graph.fused_attention

    @classmethod
    def of(cls, path: str) -> Table:
        """Return the table of the cost graph at `path`; raise FormatError if it is not one."""
        return cls(read(Path(path), CostGraph), f"table:{path}")

    def check(self, fingerprint: str, nodes: Iterable[str]) -> None:
        """Raise StaleProfileError if the cost graph is not of the model.

        `fingerprint` and `nodes` are those of the model's captured graph.
        """
        expected = self.graph.fingerprint
        if expected and expected != fingerprint:
            raise StaleProfileError(
                f"{self.name} was made for another graph ({expected[:12]}…) than this model has "
                f"with these inputs ({fingerprint[:12]}…); profile again, or bring back the model, "
                "its mode and its shapes"
            )
        # A graph without fingerprint, written by hand, is compared by the names of nodes only.
        different = sorted(set(nodes) ^ self.graph.by_name.keys())
        if different:
            owner = self.name if different[0] in self.graph.by_name else "the model"
            raise StaleProfileError(
                f"{self.name} and the model have different nodes: only {owner} has "
                f"{different[0]!r}; profile again"
            )

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost of the call's node by its name; raise InputError if there is none."""
        if call.node.name not in self.graph.by_name:
            raise InputError(
                f"{self.name} has no node {call.node.name!r}; it is of another model, profile again"
            )
        node = self.graph.by_name[call.node.name]
        inputs, weights = _halves(node)
        # In a graph that pipecompile did not write (it has no fingerprint), 0 may mean unknown.
        workspace = node.workspace_bytes if self.graph.fingerprint else node.workspace_bytes or None
        return CallCost(node.forward_ns, node.backward_ns, inputs, weights, workspace)

    def finished(self, graph: CostGraph) -> CostGraph:
        """Return `graph` with the times per step of the table's nodes."""
        # Calls are asked for the times of a microbatch, and these belong to none of its calls.
        known = self.graph.by_name
        nodes = (
            msgspec.structs.replace(node, per_step_ns=known[node.name].per_step_ns)
            for node in graph.nodes
        )
        return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _halves(node: Node) -> tuple[int, int]:
    """Return the times of the input backward and the weight backward."""
    # Both are rounded up: 7 ns are 4 and 4. Less than the
    # whole would look like a gain by splitting.
    half = -(-node.backward_ns // 2)
    return (
        half if node.backward_input_ns is None else node.backward_input_ns,
        half if node.backward_weight_ns is None else node.backward_weight_ns,
    )


@dataclass(frozen=True)
class Function:
    """A function of the user's: the c_i of GPipe (arXiv 1811.06965, section 2.2).

    If it returns only a forward time, the whole backward takes twice as long, and each of its
    halves as long as the forward.
    """

    function: CostFunction
    name: ClassVar[str] = "function"
    real: ClassVar[bool] = False
    # The function has a unit of its own, and it is not there where a plan is checked.
    time_unit: ClassVar[TimeUnit] = "relative"
    reproducible: ClassVar[bool] = False
    by_signature: ClassVar[bool] = False
    allocator: ClassVar[AllocatorName] = "cuda"
    fused_attention: ClassVar[tuple[FusedType, ...]] = FUSED_ATTENTION

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost that the function returns.

        Raise InputError if that is neither whole nanoseconds nor a CallCost of such.
        """
        cost = self.function(call.node, call)
        if not all(map(_is_whole, _figures(cost))):
            raise InputError(
                f"the cost function returned {cost!r} for node {call.node.name!r}; it must return "
                "the forward in whole nanoseconds, or a CallCost of whole nanoseconds and bytes"
            )
        return cost if isinstance(cost, CallCost) else CallCost(cost, 2 * cost, cost, cost)


def _figures(cost: object) -> Sequence[object]:
    """Return all numbers of what a cost function returned."""
    if not isinstance(cost, CallCost):
        return [cost]
    *times, workspace = astuple(cost)
    return times if workspace is None else [*times, workspace]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
