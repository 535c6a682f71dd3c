"""The digest of a captured graph: equal on every machine for the same model and shapes.

It is half of a plan's fingerprint: a change of what is digested makes committed plans stale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from pipecompile.frontend.settings import describe, layout_text, qualified_name
from pipecompile.graph.loss_module import held_loss
from pipecompile.graph.model_state import named_state
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["digest"]


def digest(module: fx.GraphModule) -> str:
    """Return SHA-256 over every node of an instantiated capture.

    Of a node it covers the name, what is called, the arguments, and shapes and types of the result.
    Strides are covered for inputs, parameters and buffers only. Those of other tensors follow from
    them, in a way that depends on the device. Of a loss that the module holds it covers the state.
    """
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _lines(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        call = f"{_called(module, node)} {_argument_text(node.args)} {_argument_text(node.kwargs)}"
        yield f"{node.name} {node.op} {call} {_value_text(node)}"
    loss = held_loss(module)
    for name, value in () if loss is None else named_state(loss):
        yield f"{name} {layout_text(value)} {value.requires_grad}"


def _called(module: fx.GraphModule, node: fx.Node) -> str:
    """Return what `node` calls: the name of a function or method, a module with its settings."""
    if node.op != "call_module":
        return node.target if isinstance(node.target, str) else qualified_name(node.target)
    leaf = module.get_submodule(str(node.target))
    settings = describe(leaf, lambda value: qualified_name(type(value)), code=False)
    return f"{node.target}={settings}"


def _argument_text(arguments: Any) -> str:
    """Return arguments as text.

    Objects that print their address are named by their type, and all devices are one.
    """

    def plain(item: Any) -> Any:
        # An address differs between processes, a device between machines.
        if " at 0x" in repr(item) or isinstance(item, torch.device):
            return qualified_name(type(item))
        return item

    return str(map_aggregate(arguments, plain))


def _value_text(node: fx.Node) -> str:
    values = tensor_leaves(node.meta["val"])
    if node.op in ("placeholder", "get_attr"):
        return str([layout_text(value) for value in values])
    return str([(tuple(v.shape), str(v.dtype), v.requires_grad) for v in values])
