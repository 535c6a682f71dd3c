"""Copied nodes: which nodes of a graph give the same value in whichever stage they run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, fx, nn

__all__ = ["is_copyable", "stages_of_copies"]


def is_copyable(node: fx.Node) -> bool:
    """Return whether each stage that reads the value of `node` may compute it for itself.

    Its value must follow from its inputs alone: it draws nothing, writes nothing, and needs no
    parameter. It has no gradient, whose parts would have to be summed. False unless `propagate` has
    found its value.
    """
    value = node.meta.get("val")
    if node.op not in ("call_function", "call_method") or not isinstance(value, Tensor):
        return False
    has_effects = node.meta["random"] or node.meta["mutates"] or node.meta.get("hook")
    # A rank learns from its own data what a forward reads out of it.
    depends_on_data = node.meta.get("data_answers") is not None
    sources = [source.meta["val"] for source in node.all_input_nodes]
    return not (
        value.requires_grad
        or has_effects
        or depends_on_data
        or any(isinstance(v, nn.Parameter) or not isinstance(v, Tensor) for v in sources)
    )


def stages_of_copies(
    graph: fx.Graph, assignment: Mapping[str, int], copied: Collection[str]
) -> dict[str, frozenset[int]]:
    """Return the stages that run each node of `copied`: those of its readers.

    `assignment` has the stages of the other nodes.
    """
    stages: dict[str, frozenset[int]] = {}
    if not copied:
        return stages
    # From the last one on, since a copied node may be read by other ones.
    for node in reversed(graph.nodes):
        if node.name in copied:
            # cos ─ half ─ attention in stages 1 and 2, with both copied: half runs in 1 and 2,
            # and so does cos.
            readers = (stages.get(u.name, frozenset({assignment[u.name]})) for u in node.users)
            stages[node.name] = frozenset().union(*readers)
    return stages
