"""Skips: a tensor that is needed several stages later travels through the stages in between.

torch.distributed.pipelining only sends between neighbours; routed tensors are exact under every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pipecompile.graph.stages import relay, stage_of

__all__ = ["Relay"]


@dataclass(frozen=True)
class Relay:
    """Requires `meta["stage"]` and values that flow forward (place).

    Ensures that every value crosses at most one boundary between its node and each reader: in each stage in between
    stands a `relay` node, with the name of the value's first node in `meta["origin"]`.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Stages are known and nothing flows back."""
        assert all(
            stage_of(source) <= stage_of(node)
            for node in graph.nodes
            for source in node.all_input_nodes
        )

    def __call__(self, graph: fx.Graph) -> None:
        """Inserts the relays."""
        first = {
            stage_of(node): node
            for node in reversed(graph.nodes)
            if node.op not in ("placeholder", "get_attr")
        }
        for node in list(graph.nodes):
            last = max((stage_of(user) for user in node.users), default=0)
            current = node
            for stage in range(stage_of(node) + 1, last):
                current = _insert(graph, current, first[stage], stage, node)

    def ensures(self, graph: fx.Graph) -> None:
        """Every edge spans at most one boundary."""
        for node in graph.nodes:
            for source in node.all_input_nodes:
                assert stage_of(node) - stage_of(source) in (0, 1), (
                    f"{source} → {node} spans several boundaries"
                )


def _insert(
    graph: fx.Graph, current: fx.Node, before: fx.Node, stage: int, origin: fx.Node
) -> fx.Node:
    """A relay in `stage`, which everything after that stage reads instead of `current`."""
    with graph.inserting_before(before):
        hop = graph.call_function(relay, (current,))
    hop.meta.update(
        origin.meta, stage=stage, origin=origin.name, random=False, mutates=(), ambient=None
    )
    current.replace_all_uses_with(
        hop, delete_user_cb=lambda user: user is not hop and stage_of(user) > stage
    )
    return hop
