"""The stages of one graph of a model, carried over to another graph of it (its evaluation, say)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from torch import fx

from pipecompile.codegen.regions import EncodedRuns, Regions, fault_of, stage_order
from pipecompile.errors import CaptureError
from pipecompile.graph.recomputability import recompute_limits
from pipecompile.graph.ties import names_of_read_state
from pipecompile.ir.encodings import Policy

__all__ = ["transfer", "transfer_regions", "transfer_encodings"]

Key = tuple[str, str, str]


def transfer(
    assignment: Mapping[str, int],
    source: fx.Graph,
    module: fx.GraphModule,
    holders: Mapping[str, tuple[int, ...]],
) -> dict[str, int]:
    """A stage for each node of `module` such that it fits the stages of `source`.

    Nodes that do the same in the same place of both graphs get the same stage; others follow their inputs, and groups
    (`meta["group"]`) stay together.
    `holders` tells which stages hold a parameter; CaptureError if a node would have to run where its are not.
    """
    old = [node for node in source.nodes if node.op != "get_attr"]
    new = [node for node in module.graph.nodes if node.op != "get_attr"]
    found = {node: assignment[twin.name] for node, twin in _twins(old, new).items()}
    stages: dict[fx.Node, int] = {}
    for node in new:
        earliest = max(
            (stages[source] for source in node.all_input_nodes if source in stages), default=0
        )
        allowed = _allowed(module, node, holders)
        wanted = max(earliest, found.get(node, 0))
        choices = (
            [stage for stage in allowed if stage >= wanted] if allowed is not None else [wanted]
        )
        if not choices:
            raise CaptureError(
                f"in this mode {node.name} ({node.meta['source']}) needs its parameters in stage {wanted} or later, "
                f"but they lie in {sorted(allowed or ())}; group its module with the one before it, or compile the "
                "model in this mode"
            )
        stages[node] = choices[0]
    _gather(stages, module, holders)
    empty = sorted(set(assignment.values()) - set(stages.values()))
    if empty:
        raise CaptureError(
            f"in this mode stage {empty[0]} has nothing to run, since the forward leaves its modules out; use fewer "
            "stages, or compile the model in this mode"
        )
    return {node.name: stage for node, stage in stages.items()}


def transfer_regions(
    regions: Regions, source: fx.Graph, module: fx.GraphModule, assignment: Mapping[str, int]
) -> dict[int, list[list[str]]]:
    """Regions for `module`, whose nodes have the stages of `assignment`: from the first node of each to its last.

    One that is not possible there is left out: its nodes then keep what they save. Requires `meta["group"]`.
    """
    limits = recompute_limits(module)
    twins = _twins(
        *(
            [node for node in graph.nodes if node.op != "get_attr"]
            for graph in (source, module.graph)
        )
    )
    names = {node.name: twin.name for node, twin in twins.items()}
    found: dict[int, list[list[str]]] = {}
    for stage, chosen in regions.items():
        order = stage_order(module.graph, assignment, stage)
        for region in map(frozenset, chosen):
            places = [place for place, name in enumerate(order) if names.get(name) in region]
            moved = order[places[0] : places[-1] + 1] if places else []
            if fault_of(limits, order, moved) is None and moved not in found.get(stage, ()):
                found.setdefault(stage, []).append(moved)
    return found


def transfer_encodings(
    savings: EncodedRuns, source: fx.Graph, module: fx.GraphModule, assignment: Mapping[str, int]
) -> dict[int, list[tuple[Sequence[str], tuple[Policy, ...]]]]:
    """The same for runs of nodes that save by policies."""
    found: dict[int, list[tuple[Sequence[str], tuple[Policy, ...]]]] = {}
    for chosen in dict.fromkeys(policies for runs in savings.values() for _, policies in runs):
        same = {
            stage: [nodes for nodes, policies in runs if policies == chosen]
            for stage, runs in savings.items()
        }
        for stage, moved in transfer_regions(same, source, module, assignment).items():
            found.setdefault(stage, []).extend((nodes, chosen) for nodes in moved)
    return found


def _twins(old: Sequence[fx.Node], new: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes of `new` that do the same in the same place as one of `old`."""
    matcher = SequenceMatcher(None, list(map(_key, old)), list(map(_key, new)), autojunk=False)
    blocks = matcher.get_matching_blocks()
    return {
        new[block.b + offset]: old[block.a + offset]
        for block in blocks
        for offset in range(block.size)
    }


def _gather(
    stages: dict[fx.Node, int], module: fx.GraphModule, holders: Mapping[str, tuple[int, ...]]
) -> None:
    """Moves nodes to later stages until no group is on two; CaptureError where parameters or inputs cannot follow."""
    groups: dict[str, list[fx.Node]] = {}
    for node in stages:
        groups.setdefault(node.meta.get("group") or node.name, []).append(node)
    moving = True
    while moving:
        moving = False
        for members in groups.values():
            before = [
                source for node in members for source in node.all_input_nodes if source in stages
            ]
            latest = max(stages[node] for node in (*members, *before))
            moving = moving or any(stages[node] < latest for node in members)
            stages.update(dict.fromkeys(members, latest))
    for node, stage in stages.items():
        allowed = {0} if node.op == "placeholder" else _allowed(module, node, holders)
        if allowed is not None and stage not in allowed:
            raise CaptureError(
                f"in this mode {node.name} ({node.meta['source'] or 'an input'}) must lie with others in stage "
                f"{stage}, but what it needs lies in {sorted(allowed)}; keep these modules together (groups), or "
                "compile the model in this mode"
            )


def _key(node: fx.Node) -> Key:
    target = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__qualname__", repr(node.target))
    )
    return node.op, target, node.meta["module"]


def _allowed(
    module: fx.GraphModule, node: fx.Node, holders: Mapping[str, tuple[int, ...]]
) -> set[int] | None:
    """The stages that hold everything that `node` reads; None if it reads nothing."""
    parts = [node, *(source for source in node.all_input_nodes if source.op == "get_attr")]
    names = [name for part in parts for name in names_of_read_state(module, part)]
    sets = [set(holders[name]) for name in names if name in holders]
    return set.intersection(*sets) if sets else None
