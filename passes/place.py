"""Placement of nodes: each is put on the stage that the partition assigns to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import fx

from pipecompile.graph.stages import stage_of

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Sets `meta["stage"]` from `assignment`, which maps names of nodes to stages.

    Requires a stage for every node except reads of parameters. Ensures that every parameter is read
    in the stage of its reader, that no value flows to an earlier stage, and that the nodes are
    ordered by stage. A read with readers in several stages becomes one read in each of them, and so
    does each node that is `copied`, whatever its stage; `meta["origin"]` of a copy is the node's
    name. `meta["order"]` is the position that a node had before.
    """

    assignment: Mapping[str, int]
    copied: Collection[str] = ()

    def requires(self, graph: fx.Graph) -> None:
        """The assignment covers the graph."""
        names = {node.name for node in graph.nodes if node.op != "get_attr"}
        missing = names - self.assignment.keys()
        assert not missing, f"no stage for {sorted(missing)}"

    def __call__(self, graph: fx.Graph) -> None:
        """Place the nodes and split reads."""
        for order, node in enumerate(list(graph.nodes)):
            node.meta["order"] = order
            if node.op != "get_attr":
                node.meta["stage"] = self.assignment[node.name]
        # A list: nodes are replaced while they are visited. The readers of a node come after it,
        # and are in their stages when it is split.
        for node in reversed(list(graph.nodes)):
            if node.op == "get_attr" or node.name in self.copied:
                _split(graph, node)
        *nodes, output = graph.nodes
        # Each node in turn is moved to the end. The sort is stable: within a stage the order stays.
        for node in sorted(nodes, key=stage_of):
            output.prepend(node)

    def ensures(self, graph: fx.Graph) -> None:
        """Values flow forward only; parameters are read where they are used."""
        for node in graph.nodes:
            for source in node.all_input_nodes:
                assert stage_of(source) <= stage_of(node), f"{source} → {node} flows back"
                assert source.op != "get_attr" or stage_of(source) == stage_of(node), (
                    f"{source} is read in stage {stage_of(source)}, not {stage_of(node)}"
                )


def _split(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a node by one in each stage that reads it."""
    for stage in sorted({stage_of(user) for user in node.users}):
        with graph.inserting_before(node):
            local = graph.node_copy(node)
        local.meta["stage"] = stage
        if node.op != "get_attr":
            local.meta["origin"] = node.name
        node.replace_all_uses_with(local, delete_user_cb=_is_in_stage(stage))
    graph.erase_node(node)


def _is_in_stage(stage: int) -> Callable[[fx.Node], bool]:
    return lambda node: stage_of(node) == stage
