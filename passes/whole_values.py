"""Whole values: on each rank, all of what leaves a stage or is given random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from pipecompile.graph.stages import origin_of
from pipecompile.graph.whole_values import whole_value

__all__ = ["WholeValues"]


@dataclass(frozen=True)
class WholeValues:
    """Inserts a call of `whole_value` for each tensor that the output or a random node reads.

    So tensor parallelism within a stage changes neither its boundaries nor its random numbers.
    Requires `meta["random"]` on every node. Ensures that these nodes read only such calls.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Random nodes are marked."""
        assert all("random" in node.meta for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the calls."""
        for node in _readers(graph):
            # Not between a random node and its `reseed`.
            place = node.prev if node.meta["random"] else node
            for value in _tensors(node):
                with graph.inserting_before(place):
                    # The shape in the model: by it a part is found
                    # that is an ordinary tensor on its rank.
                    shape = tuple(value.meta["val"].shape)
                    call = graph.call_function(whole_value, (value, shape, origin_of(value)))
                call.meta.update(value.meta, random=False, mutates=())
                node.replace_input_with(value, call)

    def ensures(self, graph: fx.Graph) -> None:
        """The output and random nodes read whole values."""
        for node in _readers(graph):
            assert all(value.target is whole_value for value in _tensors(node))


def _readers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "output" or node.meta["random"]]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), Tensor)]
