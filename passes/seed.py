"""Seeds: random numbers that do not depend on the cut, since each random node has a stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.graph.random_streams import reseed
from pipecompile.graph.stages import origin_of

__all__ = ["Seed"]


@dataclass(frozen=True)
class Seed:
    """Inserts a call of `reseed` right before each random node.

    Requires `meta["random"]` on every node. Ensures that each random node follows its `reseed`.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Random nodes are marked."""
        assert all("random" in node.meta for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the calls."""
        # A list first, so that the calls that are inserted are not visited.
        for node in [node for node in graph.nodes if node.meta["random"]]:
            with graph.inserting_before(node):
                # By the name in the whole graph, which is the same for every cut.
                call = graph.call_function(reseed, (origin_of(node),))
            call.meta.update(node.meta, random=False, mutates=(), val=None)

    def ensures(self, graph: fx.Graph) -> None:
        """Each random node follows its `reseed`."""
        assert all(node.prev.target is reseed for node in graph.nodes if node.meta["random"])
