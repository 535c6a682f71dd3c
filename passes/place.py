"""Placement of nodes: each is put on the stage that the partition assigns to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from pipecompile.graph.stages import stage_of

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Sets `meta["stage"]` from `assignment`, which maps names of nodes to stages.

    Requires a stage for every node except reads of parameters. Ensures that every parameter is read
    in the stage of its reader, that no value flows to an earlier stage, and that the nodes are
    ordered by stage. A read with readers in several stages becomes one read in each of them.
    `meta["order"]` is the position that a node had before.
    """

    assignment: Mapping[str, int]

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
        # A list: reads are split, and so replaced, while they are visited.
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            _split_read(graph, node)
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


def _split_read(graph: fx.Graph, read: fx.Node) -> None:
    """Replace a read of a parameter by one read in each stage that uses it."""
    for stage in sorted({stage_of(user) for user in read.users}):
        with graph.inserting_before(read):
            local = graph.node_copy(read)
        local.meta["stage"] = stage
        read.replace_all_uses_with(local, delete_user_cb=_is_in_stage(stage))
    graph.erase_node(read)


def _is_in_stage(stage: int) -> Callable[[fx.Node], bool]:
    return lambda node: stage_of(node) == stage
