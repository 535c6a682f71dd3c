"""The units that a graph is cut between: nodes that every cut keeps in one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from pipecompile.ir.graph import CostGraph

__all__ = ["INPUTS", "OUTPUTS", "Unit", "units"]

Unit = tuple[str, ...]
INPUTS, OUTPUTS = "inputs", "outputs"  # groups that lie in the first and in the last stage


def units(
    graph: CostGraph,
    together: Iterable[Sequence[str]] = (),
    precedence: Iterable[tuple[str, str]] = (),
) -> tuple[Unit, ...]:
    """Return the units of a graph, in a topological order as near as possible to the graph's.

    A unit has the nodes that must share a stage.

    Nodes of one group are one unit, and so are the nodes of each of `together`. Pairs of
    `precedence` order nodes as a tensor between them would. The group "outputs" comes last.

    Units on a cycle are merged too. Stages never decrease along a tensor, so every cut keeps a
    cycle in one stage, and merging loses no cut. For example, with a and c in one group, and a → b
    → c:

        a → b → c          {a,c} ⇄ b          {a,b,c}
          graph             groups merged       cycle merged
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    representative = _representatives(graph, position)
    merged = nx.DiGraph()
    merged.add_nodes_from(representative.values())
    for tensor in graph.tensors:
        producer = representative[tensor.producer]
        merged.add_edges_from((producer, representative[name]) for name in tensor.consumers)
    merged.add_edges_from((representative[a], representative[b]) for a, b in precedence)
    for names in together:
        # A cycle through the names makes them one strongly connected component.
        around = zip(names, (*names[1:], names[0]), strict=True)
        merged.add_edges_from((representative[a], representative[b]) for a, b in around)
    merged.remove_edges_from(list(nx.selfloop_edges(merged)))
    # Cycles and `together` are strongly connected components by now, and groups share a vertex.
    acyclic = nx.condensation(merged)
    component = acyclic.graph["mapping"]

    members: dict[int, list[str]] = {unit: [] for unit in acyclic}
    for name in position:
        members[component[representative[name]]].append(name)
    outputs = {component[representative[n.name]] for n in graph.nodes if n.group == OUTPUTS}
    # Outputs may be ready early, where a model returns an inner value. They come last all the
    # same, since they lie in the last stage: else few cuts of this order would be allowed.
    order = nx.lexicographical_topological_sort(
        acyclic,
        key=lambda unit: len(position) if unit in outputs else position[members[unit][0]],
    )
    return tuple(tuple(members[unit]) for unit in order)


def _representatives(graph: CostGraph, position: Mapping[str, int]) -> dict[str, int]:
    """Return, by node, the position of the first node of its group, or its own without a group."""
    first_of_group: dict[str, int] = {}
    for node in graph.nodes:
        if node.group is not None:
            first_of_group.setdefault(node.group, position[node.name])
    return {
        node.name: position[node.name] if node.group is None else first_of_group[node.group]
        for node in graph.nodes
    }
