"""Nodes of a cost graph that are kept together on demand, besides those that must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.partition.units import INPUTS, OUTPUTS

__all__ = ["grouped", "nodes_within"]


def grouped(graph: CostGraph, together: Iterable[Sequence[str]]) -> CostGraph:
    """Return the graph with the nodes of each of `together` in one group.

    Groups that share a node become one, which has the name that `pipecompile.passes.group` gives
    it: so the result is what a capture with these groups has.
    """
    links = nx.Graph()
    links.add_nodes_from(graph.places)
    members: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.group is not None:
            members.setdefault(node.group, []).append(node.name)
    for names in (*members.values(), *together):
        nx.add_path(links, names)
    group_of: dict[str, str] = {}
    for component in nx.connected_components(links):
        if len(component) > 1:
            group_of |= dict.fromkeys(component, _name(graph, component))
    return replace(
        graph,
        nodes=tuple(replace(node, group=group_of.get(node.name)) for node in graph.nodes),
    )


def _name(graph: CostGraph, component: Iterable[str]) -> str:
    """Return the name of a group: that of its first node, or of an end of the model."""
    names = sorted(component, key=graph.places.__getitem__)
    groups = {graph.by_name[name].group for name in names}
    return next((end for end in (INPUTS, OUTPUTS) if end in groups), names[0])


def nodes_within(graph: CostGraph, names: Iterable[str]) -> list[str]:
    """Return the nodes that `names` of nodes and modules stand for, in the graph's order.

    InputError if there are none of one name.
    """
    found: set[str] = set()
    for name in names:
        within = {n.name for n in graph.nodes if _is_within(n.name, n.module, name)}
        if not within:
            raise InputError(
                f"no node or module of the cost graph is called {name!r}; name the model instead "
                "of the graph"
            )
        found |= within
    return sorted(found, key=graph.places.__getitem__)


def _is_within(node: str, module: str, name: str) -> bool:
    return node == name or module == name or module.startswith(f"{name}.")
