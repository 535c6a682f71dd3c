"""The stage of a node, and the nodes that pass a tensor on through the stages in between."""

from __future__ import annotations

from torch import Tensor, fx

__all__ = ["origin_of", "relay", "stage_of"]


def stage_of(node: fx.Node) -> int:
    """The stage that runs `node`."""
    stage: int = node.meta["stage"]
    return stage


def relay(tensor: Tensor) -> Tensor:
    """The tensor itself: a stage hands on what it received."""
    return tensor


def origin_of(node: fx.Node) -> str:
    """The name of the node whose value `node` carries."""
    name: str = node.meta.get("origin", node.name)
    return name
