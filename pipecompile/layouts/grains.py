"""Cost graphs in which cuts keep layers whole, or the halves of layers."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from msgspec.structs import replace

from pipecompile.ir.audit import Grain
from pipecompile.ir.graph import CostGraph
from pipecompile.layouts.assignment import layers_of, with_parameters
from pipecompile.layouts.sections import Section, in_halves, sections_of

__all__ = ["Sections", "kept_whole", "sections_by_node"]

Sections = Sequence[Section | None]
"""What each node of a graph lies in."""

ENDS = ("inputs", "outputs")  # groups that lie in the first and in the last stage


def sections_by_node(graph: CostGraph, grain: Grain, container: str | None = None) -> Sections:
    """Return what each node lies in: for "layers" E, a layer or L; for "halves" halves of layers.

    None is for what belongs to no section, and goes where its inputs are. InputError if the
    model's layers, or their halves, cannot be told. `container` is the path of the list of layers,
    which is found unless given.
    """
    layers = layers_of(graph, container)
    modules = [node.module for node in graph.nodes]
    sections = sections_of(modules, with_parameters(graph), layers)
    return in_halves(modules, sections, layers) if grain == "halves" else sections


def kept_whole(graph: CostGraph, sections: Sections) -> CostGraph:
    """Return the same graph with the nodes of each section in one group."""
    together = nx.utils.UnionFind(node.name for node in graph.nodes)
    first: dict[Section | str, str] = {}
    for node, section in zip(graph.nodes, sections, strict=True):
        for key in (section, node.group):
            if key is not None:
                together.union(first.setdefault(key, node.name), node.name)
    group_of: dict[str, str | None] = {}
    for names in map(sorted, together.to_sets()):
        groups = {graph.by_name[name].group for name in names}
        # The groups at the ends of the pipeline stay what they are.
        ends = sorted(group for group in groups if group in ENDS)
        whole = f"whole {names[0]}" if len(names) > 1 else graph.by_name[names[0]].group
        group_of |= dict.fromkeys(names, ends[0] if ends else whole)
    nodes = tuple(replace(node, group=group_of[node.name]) for node in graph.nodes)
    return replace(graph, nodes=nodes)
