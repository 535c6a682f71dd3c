"""Modules in a graph: the module that a node belongs to."""

from __future__ import annotations

from torch import fx

__all__ = ["is_within"]


def is_within(node: fx.Node, name: str) -> bool:
    """Return whether `name` is the name of `node`, or the path of a module around it.

    A node that calls a module is within that module. For example a node `add` that was recorded in
    "layers.3.attention" is within "add", "layers.3.attention", "layers.3" and "layers", but not
    within "layer".
    """
    path = str(node.target) if node.op == "call_module" else node.meta.get("module", "")
    return node.name == name or path == name or path.startswith(f"{name}.")
