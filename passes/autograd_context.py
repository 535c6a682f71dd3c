"""Calls that enter and leave the autograd context under which nodes ran inside the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.graph.autograd_context import Ambient, Region, leave

__all__ = ["EnterRegions"]


@dataclass(frozen=True)
class EnterRegions:
    """Requires `meta["ambient"]` on nodes. Ensures that each runs under it: calls enter and leave around each run."""

    def requires(self, graph: fx.Graph) -> None:
        """Ambients are noted, and the calls are not there yet."""
        assert all("ambient" in node.meta for node in graph.nodes)
        assert all(node.target is not Region for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Inserts the calls."""
        current: Ambient | None = None
        region: fx.Node | None = None
        for node in list(graph.nodes):
            ambient = node.meta["ambient"]
            if node.op not in ("placeholder", "get_attr") and ambient != current:
                region = _switch(graph, node, region, ambient)
                current = ambient

    def ensures(self, graph: fx.Graph) -> None:
        """Every region that is entered is left."""
        for node in graph.nodes:
            assert node.target is not Region or [user.target for user in node.users] == [leave], (
                f"{node} is not left"
            )


def _switch(
    graph: fx.Graph, node: fx.Node, region: fx.Node | None, ambient: Ambient | None
) -> fx.Node | None:
    """Leaves `region` and enters `ambient` before `node`."""
    calls: list[fx.Node] = []
    with graph.inserting_before(node):
        if region is not None:
            calls.append(graph.call_function(leave, (region,)))
        state = None if ambient is None else (ambient.grad, ambient.autocast, ambient.cached)
        entering = None if state is None else graph.call_function(Region, state)
    for call in (*calls, *([entering] if entering else [])):
        call.meta.update(node.meta, random=False, mutates=(), ambient=None, val=None)
    return entering
