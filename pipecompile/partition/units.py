"""What must stay together: the units that a graph is cut between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from pipecompile.ir.graph import CostGraph

__all__ = ["FIRST", "LAST", "Unit", "units"]

Unit = tuple[str, ...]
FIRST, LAST = "inputs", "outputs"  # groups that lie in the first and in the last stage


def units(
    graph: CostGraph,
    together: Iterable[Sequence[str]] = (),
    precedence: Iterable[tuple[str, str]] = (),
) -> tuple[Unit, ...]:
    """The nodes that must stay together, in a topological order as near as possible to the graph's own.

    Nodes of one group are one unit, and so are those of each of `together` and units on a cycle: stages never
    decrease along a tensor, so a cycle lies in one stage in every cut. Pairs of `precedence` order nodes as a tensor
    between them would. The merge is exact. The group "inputs" comes first and "outputs" last.
    """
    index = {node.name: position for position, node in enumerate(graph.nodes)}
    first: dict[str, int] = {}
    for node in graph.nodes:
        if node.group is not None:
            first.setdefault(node.group, index[node.name])
    owner = {
        node.name: index[node.name] if node.group is None else first[node.group]
        for node in graph.nodes
    }
    merged = nx.DiGraph()
    merged.add_nodes_from(owner.values())
    merged.add_edges_from(
        (owner[t.producer], owner[name]) for t in graph.tensors for name in t.consumers
    )
    merged.add_edges_from((owner[a], owner[b]) for a, b in precedence)
    for names in together:
        merged.add_edges_from(
            (owner[a], owner[b]) for a, b in zip(names, (*names[1:], names[0]), strict=True)
        )
    merged.remove_edges_from(list(nx.selfloop_edges(merged)))
    acyclic = nx.condensation(merged)
    members: dict[int, list[str]] = {unit: [] for unit in acyclic}
    for name in index:
        members[acyclic.graph["mapping"][owner[name]]].append(name)
    last = acyclic.graph["mapping"].get(first.get(LAST))
    order = nx.lexicographical_topological_sort(
        acyclic, key=lambda unit: len(index) if unit == last else index[members[unit][0]]
    )
    return tuple(tuple(members[unit]) for unit in order)
