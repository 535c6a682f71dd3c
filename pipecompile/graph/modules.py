"""Which module a node lies in."""

from __future__ import annotations

from torch import fx

__all__ = ["belongs"]


def belongs(node: fx.Node, name: str) -> bool:
    """Whether `name` is the node, or a module that the node is or lies in."""
    path = str(node.target) if node.op == "call_module" else node.meta.get("module", "")
    return node.name == name or path == name or path.startswith(f"{name}.")
