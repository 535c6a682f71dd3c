"""Batch norms that update their running averages once a step instead of once a microbatch."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from pipecompile.errors import InputError
from pipecompile.graph.batch_statistics import (
    BATCH_NORMS,
    DeferredBatchNorm,
    is_other_batch_norm,
    other_batch_norm_error,
)
from pipecompile.graph.stages import origin_of

__all__ = ["DeferStatistics", "MarkBatchNorms"]


@dataclass(frozen=True)
class MarkBatchNorms:
    """Marks the nodes whose running averages wait for the end of the step: `meta["deferred"]`.

    These are batch norms of torch that update buffers, and modules that write to their state: a
    batch norm may lie in any of these. Requires `meta["mutates"]` (propagate). Ensures that each
    marked node can wait; InputError names the one that cannot.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Side effects are known."""
        assert all("mutates" in node.meta for node in graph.nodes), "propagate first"

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the nodes."""
        for node in graph.nodes:
            if not node.meta["mutates"]:
                continue
            if is_other_batch_norm(node.target):
                raise InputError(other_batch_norm_error(node.name, node.target))
            # Other writes, such as a counter in the forward
            # itself, stay as they are in each microbatch.
            if node.op == "call_module" or node.target in BATCH_NORMS:
                node.meta["deferred"] = True

    def ensures(self, graph: fx.Graph) -> None:
        """Batch norms that update buffers are marked."""
        for node in graph.nodes:
            if node.target in BATCH_NORMS and node.meta["mutates"]:
                assert node.meta["deferred"], f"{node} is not marked"


@dataclass(frozen=True)
class DeferStatistics:
    """Replaces each marked node by a call of a `DeferredBatchNorm`.

    Requires `meta["mutates"]`. Ensures that no marked node updates running averages itself. A
    module becomes an argument of the call:

        before   norm = self.norm(x)
        after    norm_1 = self.norm
                 norm = deferred_batch_norm(norm_1, x)
    """

    def requires(self, graph: fx.Graph) -> None:
        """Side effects are known."""
        assert all("mutates" in node.meta for node in graph.nodes if node.meta.get("deferred"))

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the nodes."""
        for node in list(graph.nodes):
            if not _is_deferred(node):
                continue
            if node.op == "call_module":
                _call_as_function(graph, node)
            else:
                node.target = DeferredBatchNorm(node.target, origin_of(node))

    def ensures(self, graph: fx.Graph) -> None:
        """Every marked node is a deferred call."""
        for node in graph.nodes:
            assert not _is_deferred(node), f"{node} updates its averages in each microbatch"


def _is_deferred(node: fx.Node) -> bool:
    """Return whether a marked node is still to be replaced."""
    # Nodes that change the layout of a marked one have its meta too, but write to nothing.
    is_marked = node.meta.get("deferred", False) and node.meta["mutates"]
    return bool(is_marked) and not isinstance(node.target, DeferredBatchNorm)


def _call_as_function(graph: fx.Graph, node: fx.Node) -> None:
    """Turn the call of a module into that of a function, whose first argument is the module."""
    with graph.inserting_before(node):
        read = graph.get_attr(str(node.target))
    # The read lies where the node lies, but does nothing of what the node does.
    read.meta.update(node.meta, random=False, mutates=(), autograd_context=None, val=None)
    node.op = "call_function"
    node.target = DeferredBatchNorm(operator.call, origin_of(node))
    node.args = (read, *node.args)
