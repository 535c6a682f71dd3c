"""The stages of one graph of a model, carried over to another graph of it (its evaluation, say)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from torch import fx

from pipecompile.errors import CaptureError
from pipecompile.passes.ties import reads_of

__all__ = ["transfer"]

Key = tuple[str, str, str]


def transfer(
    assignment: Mapping[str, int], source: fx.Graph, module: fx.GraphModule, holders: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """A stage for each node of `module` such that it fits the stages of `source`.

    Nodes that do the same in the same place of both graphs get the same stage; others follow their inputs, and groups
    (`meta["group"]`) stay together.
    `holders` tells which stages hold a parameter; CaptureError if a node would have to run where its are not.
    """
    old = [node for node in source.nodes if node.op != "get_attr"]
    new = [node for node in module.graph.nodes if node.op != "get_attr"]
    matcher = SequenceMatcher(None, list(map(_key, old)), list(map(_key, new)), autojunk=False)
    found = {
        new[block.b + offset]: assignment[old[block.a + offset].name]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
    stages: dict[fx.Node, int] = {}
    for node in new:
        earliest = max((stages[source] for source in node.all_input_nodes if source in stages), default=0)
        allowed = _allowed(module, node, holders)
        wanted = max(earliest, found.get(node, 0))
        choices = [stage for stage in allowed if stage >= wanted] if allowed is not None else [wanted]
        if not choices:
            raise CaptureError(
                f"in this mode {node.name} ({node.meta['source']}) needs its parameters in stage {wanted} or later, "
                f"but they lie in {sorted(allowed or ())}; group its module with the one before it"
            )
        stages[node] = choices[0]
    _gather(stages, module, holders)
    return {node.name: stage for node, stage in stages.items()}


def _gather(stages: dict[fx.Node, int], module: fx.GraphModule, holders: Mapping[str, tuple[int, ...]]) -> None:
    """Moves nodes to later stages until no group is on two; CaptureError where parameters or inputs cannot follow."""
    groups: dict[str, list[fx.Node]] = {}
    for node in stages:
        groups.setdefault(node.meta.get("group") or node.name, []).append(node)
    moving = True
    while moving:
        moving = False
        for members in groups.values():
            before = [source for node in members for source in node.all_input_nodes if source in stages]
            latest = max(stages[node] for node in (*members, *before))
            moving = moving or any(stages[node] < latest for node in members)
            stages.update(dict.fromkeys(members, latest))
    for node, stage in stages.items():
        allowed = {0} if node.op == "placeholder" else _allowed(module, node, holders)
        if allowed is not None and stage not in allowed:
            raise CaptureError(
                f"in this mode {node.name} ({node.meta['source'] or 'an input'}) must lie with others in stage "
                f"{stage}, but what it needs lies in {sorted(allowed)}; keep these modules together (groups)"
            )


def _key(node: fx.Node) -> Key:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", repr(node.target))
    return node.op, target, node.meta["module"]


def _allowed(module: fx.GraphModule, node: fx.Node, holders: Mapping[str, tuple[int, ...]]) -> set[int] | None:
    """The stages that hold everything that `node` reads; None if it reads nothing."""
    parts = [node, *(source for source in node.all_input_nodes if source.op == "get_attr")]
    names = [name for part in parts for name in reads_of(module, part)]
    sets = [set(holders[name]) for name in names if name in holders]
    return set.intersection(*sets) if sets else None
