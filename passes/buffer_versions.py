"""Buffer versions: what a backward keeps of a buffer is a copy, which no later write changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key

__all__ = ["KeepVersions"]


@dataclass(frozen=True)
class KeepVersions:
    """Inserts a copy of a buffer that the forward writes to before each node that may save it.

    Several microbatches are in flight in a pipeline. So the write of a later one comes before the
    backward of an earlier one, which needs the buffer as it was:

        mean = self.mean.lerp_(x.mean(0), 0.1)         mean = self.mean.lerp_(x.mean(0), 0.1)
        return x / mean                                return x / mean.clone()

    Requires `meta["val"]` and `meta["mutates"]` on every node. Ensures that no node whose result
    has a gradient reads a written buffer, unless it writes to it or returns a view of it.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Values and writes are known."""
        assert all({"val", "mutates"} <= node.meta.keys() for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the copies, whose values are not known yet."""
        for node, buffer in list(_readers(graph)):
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (buffer,))
            kept = ("module", "source", "autograd_context")
            copy.meta.update({key: node.meta[key] for key in kept}, random=False, mutates=False)
            node.replace_input_with(buffer, copy)

    def ensures(self, graph: fx.Graph) -> None:
        """Only copies are read."""
        known = (node for node in graph.nodes if "val" in node.meta)
        written = _written_storages(graph)
        for node in known:
            for source in node.all_input_nodes:
                assert "val" not in source.meta or not _may_save(node, source, written)


def _readers(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each node with a written buffer, or a view of it, that it may save."""
    written = _written_storages(graph)
    for node in graph.nodes if written else ():
        for source in node.all_input_nodes:
            if _may_save(node, source, written):
                yield node, source


def _written_storages(graph: fx.Graph) -> frozenset[int]:
    """Return the storages of the model's own tensors that nodes write to."""
    written = {storage_key(each) for node in graph.nodes for each in node.meta["mutates"] or ()}
    reads = graph.find_nodes(op="get_attr") if written else ()
    own = (node.meta["val"] for node in reads)
    return frozenset(storage_key(each) for each in own if not each.requires_grad) & written


def _may_save(node: fx.Node, source: fx.Node, written: frozenset[int]) -> bool:
    value = source.meta["val"]
    if not isinstance(value, Tensor) or node.op == "output" or storage_key(value) not in written:
        return False
    # A node that writes to the buffer must get the buffer, not a copy that nobody reads. A view
    # must be one of the buffer too, since a later write would not be seen in a view of a copy.
    own = {storage_key(tensor) for tensor in node.meta["mutates"]}
    results = tensor_leaves(node.meta["val"])
    views = {storage_key(result) for result in results}
    has_gradient = any(result.requires_grad for result in results)
    return has_gradient and storage_key(value) not in own | views
