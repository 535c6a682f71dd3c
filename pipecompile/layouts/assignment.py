"""From a layout to the stage of each node of a cost graph, or an error that shows both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from pipecompile.errors import InputError, unknown
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plurals import counted
from pipecompile.layouts.data_flow import completed
from pipecompile.layouts.layers import LayerList, ancestors, find_layers, lies_in
from pipecompile.layouts.layout import BEGINNING, HYBRID_ATTENTION, NODE, Layout
from pipecompile.layouts.sections import (
    ATTENTION,
    MLP,
    Section,
    in_halves,
    parameter_modules,
    sections_of,
)

__all__ = ["assignment_of", "layers_of", "named_nodes", "with_parameters"]


def assignment_of(layout: Layout, graph: CostGraph, container: str | None = None) -> dict[str, int]:
    """Return the stage of each node of `graph`.

    `container` is the path of the list of layers, which is found unless given. Nodes that the
    layout does not name are placed by the data flow. InputError where layout and model do not
    match.
    """
    named = named_nodes(layout, graph, container)
    assignment = completed(graph, named)
    empty = sorted(set(range(layout.k)) - set(assignment.values()))
    if empty:
        raise InputError(
            f"the layout has {counted(layout.k, 'stage')}, but no node of the model lies in stage "
            f"{empty[0]}: {_contents(layout, empty[0])}; a stage of a plan runs at least one node"
        )
    return assignment


def named_nodes(layout: Layout, graph: CostGraph, container: str | None = None) -> dict[str, int]:
    """Return the stages of the nodes that `layout` names; InputError if it does not match."""
    if layout.format == "split-spec":
        return _by_splits(layout, graph)
    if layout.format in ("torchtitan", "device-map", "json"):
        return _by_prefixes(layout, graph)
    return _by_sections(layout, graph, container)


def layers_of(graph: CostGraph, container: str | None = None) -> LayerList:
    """Return the layers of the model that `graph` is of."""
    ns_by_module = Counter[str]()
    for node in graph.nodes:
        ns_by_module[node.module] += node.forward_ns + node.backward_ns
    return find_layers(ns_by_module, container)


def _contents(layout: Layout, stage: int) -> str:
    return f"it has {', '.join(layout.stages[stage]) or 'nothing'}"


# Symbols: E t m L, halves of layers, and counts of layers


def _by_sections(layout: Layout, graph: CostGraph, container: str | None) -> dict[str, int]:
    layers = layers_of(graph, container)
    modules = [node.module for node in graph.nodes]
    sections = sections_of(modules, with_parameters(graph), layers)
    if layout.format == "megatron-hybrid":
        sections = in_halves(modules, sections, layers)
    there = {section for section in sections if section is not None}
    stages = _stages_of_sections(layout, there)
    _check_sections(stages, there, layers, layout)
    return {
        node.name: stages[section]
        for node, section in zip(graph.nodes, sections, strict=True)
        if section in stages
    }


def _stages_of_sections(layout: Layout, there: set[Section]) -> dict[Section, int]:
    """Return the stage of each section that the symbols of a layout stand for."""
    stages: dict[Section, int] = {}
    numbers = Counter[str]()
    for stage, symbols in enumerate(layout.stages):
        for symbol in symbols:
            if layout.format == "megatron-hybrid":
                symbol = ATTENTION if symbol in HYBRID_ATTENTION else MLP
            # Symbols are numbered through: Ett|tL is E0, t0, t1 in stage 0 and t2, L0 in stage 1.
            stages[Section(symbol, numbers[symbol])] = stage
            numbers[symbol] += 1
    if layout.format != "megatron":
        # Counts and patterns are of layers alone: what is around them lies at the ends.
        ends = {"E": 0, "m": layout.k - 1, "L": layout.k - 1}
        stages |= {section: ends[section.symbol] for section in there if section.symbol in ends}
    return stages


def _check_sections(
    stages: Mapping[Section, int], there: set[Section], layers: LayerList, layout: Layout
) -> None:
    """Raise InputError unless the layout has each section of the model once, and no others."""
    for symbol in ("t", "m", ATTENTION, MLP):
        has = sum(section.symbol == symbol for section in stages)
        expected = sum(section.symbol == symbol for section in there)
        if has != expected:
            what = "MTP layers (m)" if symbol == "m" else "layers"
            where = f" ({layers})" if symbol != "m" else ""
            raise InputError(
                f"the layout has {has} {what}, but the model has {expected}{where}; give each "
                "layer of the model a place, or name another list of layers (layers)"
            )
    for symbol, what in (("E", "embedding (E)"), ("L", "norm, head or loss (L)")):
        has = sum(section.symbol == symbol for section in stages)
        is_there = Section(symbol) in there
        if layout.format == "megatron" and (has != is_there):
            raise InputError(
                f"the layout has {has} × {symbol}, but the model has {'an' if is_there else 'no'} "
                f"{what} {'' if is_there else 'outside of its layers '}({layers}); write {symbol} "
                f"{'once' if is_there else 'nowhere'}"
            )


# Modules and nodes by name


def _by_prefixes(layout: Layout, graph: CostGraph) -> dict[str, int]:
    """Return the stages of nodes by their own name, or by the longest prefix of their module."""
    stages: dict[str, int] = {}
    for stage, entries in enumerate(layout.stages):
        for entry in entries:
            if entry in stages:
                raise InputError(
                    f"the layout names {entry!r} twice, in stages {stages[entry]} and {stage}; "
                    "name each module once"
                )
            stages[entry] = stage
    _refuse_unknown(stages, graph)
    named: dict[str, int] = {}
    for node in graph.nodes:
        # The most exact name decides: %view_3 before layers.3.mlp before layers.3.
        entries = (f"{NODE}{node.name}", *ancestors(node.module))
        prefixes = [entry for entry in entries if entry in stages]
        if prefixes:
            named[node.name] = stages[prefixes[0]]
    _refuse_missing(named, graph)
    return named


def _refuse_unknown(entries: Iterable[str], graph: CostGraph) -> None:
    paths = {path for node in graph.nodes for path in ancestors(node.module)}
    for entry in entries:
        if entry.startswith(NODE):
            if entry[len(NODE) :] not in graph.by_name:
                raise unknown("node", entry[len(NODE) :], graph.by_name, listed_in="its graph")
        elif entry not in paths:
            raise unknown("module", entry, sorted(paths - {""}), listed_in="the model")


def _refuse_missing(named: Mapping[str, int], graph: CostGraph) -> None:
    """Raise InputError if a module with parameters and nothing in it has no stage."""
    modules = with_parameters(graph)
    # A module with others in it is named by them.
    around = {path for node in graph.nodes for path in ancestors(node.module)[1:]}
    for node in graph.nodes:
        if node.module in modules - around and node.name not in named:
            raise InputError(
                f"the layout has no stage for the module {node.module!r}, which has parameters; "
                "name it, or a module around it, in one of the stages"
            )


def with_parameters(graph: CostGraph) -> frozenset[str]:
    """Return the paths of the modules that have parameters or buffers of their own."""
    names = (name for each in graph.parameters for name in (each.name, *each.aliases))
    return parameter_modules(names)


# Split points


def _by_splits(layout: Layout, graph: CostGraph) -> dict[str, int]:
    """Return the stages of all nodes, which a split spec parts in the order of the forward."""
    begins: list[tuple[int, str]] = []
    for module, point in layout.stages[1:]:
        places = [place for place, n in enumerate(graph.nodes) if lies_in(n.module, module)]
        if not places:
            _refuse_unknown([module], graph)
        begins.append((places[0] if point == BEGINNING else places[-1] + 1, f"{module}.{point}"))
    begins.sort()
    for (left, earlier), (right, later) in pairwise(begins):
        if left == right:
            raise InputError(
                f"the layout cuts twice at the same place, at {earlier} and at {later}; leave one "
                "of them out"
            )
    named = {}
    for place, node in enumerate(graph.nodes):
        # With cuts at 5 and 9 node 7 lies in stage 1: one stage has begun behind the first.
        named[node.name] = sum(begin <= place for begin, _ in begins)
    return named
