"""Nodes of a cost graph that are kept together on demand, besides those that must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.partition.units import INPUTS, OUTPUTS

__all__ = ["grouped", "nodes_within"]


ENDS_OF_MODEL = ("placeholder", "output")  # operators that compute nothing


def grouped(graph: CostGraph, together: Iterable[Sequence[str]]) -> CostGraph:
    """Return the graph with the nodes of each of `together` in one group.

    Groups that share a node become one, which has the name that `pipecompile.passes.group` gives
    it. Nodes of a group are recomputed together or not at all.
    """
    components = [names for names in _components(graph, together) if len(names) > 1]
    group_of = {name: _name(graph, names) for names in components for name in names}
    operations = (
        tuple(name for name in names if graph.by_name[name].operator not in ENDS_OF_MODEL)
        for names in components
    )
    recomputed = tuple(names for names in operations if len(names) > 1)
    # One node that may not run twice keeps its group from it.
    fixed = {n.name for n in graph.nodes if not n.is_recomputable}
    kept = {name for names in recomputed if fixed & set(names) for name in names}
    nodes = (
        replace(n, group=group_of.get(n.name), is_recomputable=n.name not in fixed | kept)
        for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes), recomputed_together=recomputed)


def _components(graph: CostGraph, together: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return all nodes in sets that share a group, each in the graph's order."""
    links = nx.Graph()
    links.add_nodes_from(graph.places)
    members: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.group is not None:
            members.setdefault(node.group, []).append(node.name)
    # A path through the names is enough to join them, and linear in their number.
    for names in (*members.values(), *together):
        nx.add_path(links, names)
    return [sorted(each, key=graph.places.__getitem__) for each in nx.connected_components(links)]


def _name(graph: CostGraph, names: Sequence[str]) -> str:
    """Return the name of a group: that of its first node, or of an end of the model."""
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
