"""What a captured graph is, as one number: equal on every machine for the same model and shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipecompile.passes.propagate import named_state

__all__ = ["digest"]


def digest(module: fx.GraphModule) -> str:
    """SHA-256 over every node of an instantiated capture: what it calls, on what, and what comes out."""
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _lines(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        yield f"{node.name} {node.op} {_called(module, node)} {_text(node.args)} {_text(node.kwargs)} {_value(node)}"


def _called(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op != "call_module":
        return node.target if isinstance(node.target, str) else _qualified(node.target)
    leaf = module.get_submodule(str(node.target))
    state = [f"{name}:{tuple(value.shape)}:{value.dtype}:{value.requires_grad}" for name, value in named_state(leaf)]
    return f"{node.target}={_qualified(type(leaf))}({leaf.extra_repr()}) training={leaf.training} {state}"


def _qualified(function: Any) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', getattr(function, '__name__', type(function).__name__))}"


def _text(arguments: Any) -> str:
    """Arguments as text; objects that print their address are named by their type, and all devices are one."""

    def plain(item: Any) -> Any:
        text = repr(item)
        return _qualified(type(item)) if " at 0x" in text or isinstance(item, torch.device) else item

    return str(map_aggregate(arguments, plain))


def _value(node: fx.Node) -> str:
    leaves = torch.utils._pytree.tree_leaves(node.meta["val"])
    return str([(tuple(v.shape), str(v.dtype), v.requires_grad) for v in leaves if isinstance(v, Tensor)])
