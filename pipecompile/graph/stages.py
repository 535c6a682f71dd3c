"""Stages in a graph: the stage of a node, and the calls that relay a tensor through stages."""

from __future__ import annotations

from torch import Tensor, fx

__all__ = ["origin_of", "relay", "stage_of"]


def stage_of(node: fx.Node) -> int:
    """Return the stage that runs `node`."""
    stage: int = node.meta["stage"]
    return stage


def relay(tensor: Tensor) -> Tensor:
    """Return `tensor` itself: a stage passes on what it received."""
    return tensor


def origin_of(node: fx.Node) -> str:
    """Return the name of the node that computed the value of `node`: for a relay, not the relay."""
    name: str = node.meta.get("origin", node.name)
    return name
