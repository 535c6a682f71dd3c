"""The data flow between nodes: it places those that a layout does not name, and checks the others.

Nodes of a group share a stage, so a group is placed like a node.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph

__all__ = ["completed"]


def completed(graph: CostGraph, named: Mapping[str, int]) -> dict[str, int]:
    """Return the stages of all nodes, those of `named` included.

    A node that depends on a named one lies in the latest stage of its inputs, another one in the
    earliest stage that reads it. InputError if a node would run before what it needs, or if nodes
    that must share a stage are parted.
    """
    place = {node.name: node.group or f"node {node.name}" for node in graph.nodes}
    fixed: dict[str, int] = {}
    for name, stage in named.items():
        if fixed.setdefault(place[name], stage) != stage:
            raise InputError(_parted(graph, named, name))
    edges = [
        (place[tensor.producer], place[consumer])
        for tensor in graph.tensors
        for consumer in tensor.consumers
    ]
    free = [(a, b) for a, b in edges if a != b]
    # With a in stage 0 and c in stage 1, both named:
    #
    #     mask ─▶ a ─▶ b ─▶ c      b depends on a: stage 0, that of its latest input
    #                              mask depends on nothing named: stage 0, where it is first read
    #
    stages = _latest_input(free, fixed)
    stages = _earliest_reader(free, stages)
    assignment = {node.name: stages.get(place[node.name], 0) for node in graph.nodes}
    _check_order(graph, assignment)
    return assignment


def _latest_input(edges: list[tuple[str, str]], fixed: Mapping[str, int]) -> dict[str, int]:
    """Return `fixed` stages, and those of all places that depend on them."""
    stages = dict(fixed)
    # Edges are about in the order of the forward, so that few rounds are needed.
    is_settled = False
    while not is_settled:
        is_settled = True
        for source, reader in edges:
            stage = stages.get(source, -1)
            if reader not in fixed and stage > stages.get(reader, -1):
                stages[reader] = stage
                is_settled = False
    return stages


def _earliest_reader(edges: list[tuple[str, str]], known: Mapping[str, int]) -> dict[str, int]:
    """Return `known` stages, and those of all places that they depend on."""
    stages = dict(known)
    is_settled = False
    while not is_settled:
        is_settled = True
        for source, reader in reversed(edges):
            stage = stages.get(reader)
            # One that is not known yet counts as later than any.
            if source not in known and stage is not None and stage < stages.get(source, stage + 1):
                stages[source] = stage
                is_settled = False
    return stages


def _parted(graph: CostGraph, named: Mapping[str, int], name: str) -> str:
    """Return what is wrong with the stage of `name`: another node of its group has another one."""
    group = graph.by_name[name].group
    other = next(n.name for n in graph.nodes if n.group == group and n.name in named)
    return (
        f"the layout parts nodes that must share a stage (group {group}): {other} lies in stage "
        f"{named[other]}, {name} in stage {named[name]}; put them together"
    )


def _check_order(graph: CostGraph, assignment: Mapping[str, int]) -> None:
    """Raise InputError if a stage would need what a later one makes."""
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            before, after = assignment[tensor.producer], assignment[consumer]
            if before > after:
                source, reader = (graph.by_name[n] for n in (tensor.producer, consumer))
                raise InputError(
                    f"the layout is against the data flow: {reader.module or reader.name} in "
                    f"stage {after} reads what {source.module or source.name} in stage {before} "
                    "makes; put the first into the same stage or a later one"
                )
