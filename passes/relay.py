"""Relays: a tensor that is needed several stages later passes through the stages in between.

torch.distributed.pipelining only sends between neighbouring stages. A relayed tensor is the same
under every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.graph.stages import relay, stage_of

__all__ = ["Relay"]


@dataclass(frozen=True)
class Relay:
    """Inserts a `relay` node into each stage between a value's node and its last reader.

    Requires `meta["stage"]` and values that flow forward (Place). Ensures that no edge spans more
    than one boundary. `meta["origin"]` of a relay is the name of the node that computes the value:

        stage 0      stage 1          stage 2          stage 3
        x ──────▶ relay(x) ──────▶ relay_1(relay) ──▶ y = f(relay_1)
    """

    def requires(self, graph: fx.Graph) -> None:
        """Stages are known and no value flows back."""
        for node in graph.nodes:
            assert all(stage_of(source) <= stage_of(node) for source in node.all_input_nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the relays."""
        # The last assignment wins: reversed, this is the first operation of each stage.
        first = {
            stage_of(node): node
            for node in reversed(graph.nodes)
            if node.op not in ("placeholder", "get_attr")
        }
        for node in list(graph.nodes):
            # Of all readers the last one counts: those in
            # between read the relay of their own stage.
            last = max((stage_of(user) for user in node.users), default=0)
            current = node
            # The last reader's own stage needs no relay: it receives from the stage before.
            for stage in range(stage_of(node) + 1, last):
                current = _insert_relay(graph, current, first[stage], stage, node)

    def ensures(self, graph: fx.Graph) -> None:
        """Every edge spans at most one boundary."""
        for node in graph.nodes:
            for source in node.all_input_nodes:
                assert stage_of(node) - stage_of(source) in (0, 1), (
                    f"{source} → {node} spans several boundaries"
                )


def _insert_relay(
    graph: fx.Graph, current: fx.Node, before: fx.Node, stage: int, origin: fx.Node
) -> fx.Node:
    """Return a relay of `current` in `stage`; all later stages read the relay instead."""
    with graph.inserting_before(before):
        hop = graph.call_function(relay, (current,))
    # It has the value and shape of its origin, but no side effects: it computes nothing.
    hop.meta.update(origin.meta, stage=stage, origin=origin.name)
    hop.meta.update(random=False, mutates=(), autograd_context=None)
    current.replace_all_uses_with(
        hop, delete_user_cb=lambda user: user is not hop and stage_of(user) > stage
    )
    return hop
