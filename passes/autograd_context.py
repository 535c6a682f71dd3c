"""Calls that enter and leave the autograd contexts under which nodes ran inside the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.graph.autograd_context import AutogradContext, EnteredContext, leave_context

__all__ = ["EnterContexts"]


@dataclass(frozen=True)
class EnterContexts:
    """Puts the calls around each run of nodes that share a context.

    Requires `meta["autograd_context"]` on every node. Ensures that every node runs under its
    context, and that every context that is entered is left.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Contexts are noted, and the calls are not there yet."""
        assert all("autograd_context" in node.meta for node in graph.nodes)
        assert all(node.target is not EnteredContext for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the calls."""
        current: AutogradContext | None = None
        entered: fx.Node | None = None
        for node in list(graph.nodes):
            context = node.meta["autograd_context"]
            # Inputs and reads of parameters compute nothing, so they do not end a run of nodes.
            # The output has no context, so the last one that was entered is left in front of it.
            if node.op not in ("placeholder", "get_attr") and context != current:
                entered = _switch_context(graph, node, entered, context)
                current = context

    def ensures(self, graph: fx.Graph) -> None:
        """Every context that is entered is left."""
        for node in graph.nodes:
            if node.target is EnteredContext:
                assert [user.target for user in node.users] == [leave_context], (
                    f"{node} is not left"
                )


def _switch_context(
    graph: fx.Graph, node: fx.Node, entered: fx.Node | None, context: AutogradContext | None
) -> fx.Node | None:
    """Leave `entered` and enter `context` before `node`; return the call that enters it."""
    calls: list[fx.Node] = []
    entering: fx.Node | None = None
    with graph.inserting_before(node):
        if entered is not None:
            calls.append(graph.call_function(leave_context, (entered,)))
        if context is not None:
            arguments = (context.grad, context.autocast, context.caches_casts)
            entering = graph.call_function(EnteredContext, arguments)
            calls.append(entering)
    for call in calls:
        call.meta.update(node.meta, random=False, mutates=(), autograd_context=None, val=None)
    return entering
