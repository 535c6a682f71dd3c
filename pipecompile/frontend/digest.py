"""What a captured graph is, as one number: equal on every machine for the same model and shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipecompile.frontend.settings import described, layout, qualified

__all__ = ["digest"]


def digest(module: fx.GraphModule) -> str:
    """SHA-256 over every node of an instantiated capture: what it calls, on what, and what comes out.

    Strides are those of what goes in: inputs, parameters and buffers. The others follow from them, on each device its
    own way.
    """
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _lines(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        yield f"{node.name} {node.op} {_called(module, node)} {_text(node.args)} {_text(node.kwargs)} {_value(node)}"


def _called(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op != "call_module":
        return node.target if isinstance(node.target, str) else qualified(node.target)
    leaf = module.get_submodule(str(node.target))
    return f"{node.target}={described(leaf, lambda value: qualified(type(value)), code=False)}"


def _text(arguments: Any) -> str:
    """Arguments as text; objects that print their address are named by their type, and all devices are one."""

    def plain(item: Any) -> Any:
        text = repr(item)
        return qualified(type(item)) if " at 0x" in text or isinstance(item, torch.device) else item

    return str(map_aggregate(arguments, plain))


def _value(node: fx.Node) -> str:
    leaves = [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(node.meta["val"])
        if isinstance(leaf, Tensor)
    ]
    if node.op in ("placeholder", "get_attr"):
        return str([layout(leaf) for leaf in leaves])
    return str([(tuple(v.shape), str(v.dtype), v.requires_grad) for v in leaves])
