"""Puts every node on its stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from pipecompile.graph.stages import stage_of

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Sets `meta["stage"]` from `assignment` (node name → stage).

    Requires a stage for every node but the reads of parameters. Ensures that every parameter is read in the stage
    of its reader (a read with readers in several stages becomes one read in each), that no value flows back, and that
    the nodes stand stage by stage; `meta["order"]` keeps where they stood before.
    """

    assignment: Mapping[str, int]

    def requires(self, graph: fx.Graph) -> None:
        """The assignment covers the graph."""
        missing = {
            node.name for node in graph.nodes if node.op != "get_attr"
        } - self.assignment.keys()
        assert not missing, f"no stage for {sorted(missing)}"

    def __call__(self, graph: fx.Graph) -> None:
        """Places the nodes; splits reads."""
        for order, node in enumerate(list(graph.nodes)):
            node.meta["order"] = order
            if node.op != "get_attr":
                node.meta["stage"] = self.assignment[node.name]
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            _split(graph, node)
        *nodes, output = graph.nodes
        for node in sorted(nodes, key=stage_of):  # a stable sort: within a stage the order stays
            output.prepend(node)

    def ensures(self, graph: fx.Graph) -> None:
        """Values flow forward only; parameters are read where they are used."""
        for node in graph.nodes:
            for source in node.all_input_nodes:
                assert stage_of(source) <= stage_of(node), f"{source} → {node} flows back"
                assert source.op != "get_attr" or stage_of(source) == stage_of(node), (
                    f"{source} is read elsewhere"
                )


def _split(graph: fx.Graph, read: fx.Node) -> None:
    """One read per stage that uses it."""
    for stage in sorted({stage_of(user) for user in read.users}):
        with graph.inserting_before(read):
            local = graph.node_copy(read)
        local.meta["stage"] = stage
        read.replace_all_uses_with(local, delete_user_cb=_lies_in(stage))
    graph.erase_node(read)


def _lies_in(stage: int) -> Callable[[fx.Node], bool]:
    return lambda node: stage_of(node) == stage
