"""The digest of a captured graph: equal on every machine for the same model and shapes.

It is half of a plan's fingerprint: a change of what is digested makes committed plans stale.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from pipecompile.frontend.settings import describe, layout_text, qualified_name
from pipecompile.graph.loss_module import held_loss
from pipecompile.graph.model_state import named_state
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["digest", "node_digests"]

_LETTERS = 8  # of a node's digest: two nodes are compared, so that 32 bits are plenty


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


def node_digests(module: fx.GraphModule) -> dict[str, str]:
    """Return for each node but reads of parameters a digest of what it does: as in `digest`,
    without names of nodes.

    Names are numbered through the graph, and a node that is inserted must not change the digests
    of others. So an input is known by how many nodes of the same module lie between; of one that
    comes from elsewhere nothing is covered, and of a parameter its name and its shape.
    """
    place_in_module: dict[fx.Node, int] = {}
    count = Counter[str]()
    texts: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        path = node.meta.get("module", "")
        place_in_module[node] = count[path]
        count[path] += 1
        sources = node.all_input_nodes
        inputs = {source: _input_text(node, source, place_in_module) for source in sources}
        arguments = (_argument_text(part, inputs) for part in (node.args, node.kwargs))
        line = f"{node.op} {_called(module, node)} {' '.join(arguments)} {_value_text(node)}"
        texts[node.name] = hashlib.sha256(line.encode()).hexdigest()[:_LETTERS]
    return texts


def _input_text(node: fx.Node, source: fx.Node, place_in_module: Mapping[fx.Node, int]) -> str:
    if source.op == "get_attr":
        return f"{source.target} {_value_text(source)}"
    # "-2" is the node two before this one in their module. A node that is inserted into another
    # module, or before both of them, leaves that as it is.
    if source.meta.get("module", "") == node.meta.get("module", ""):
        return f"-{place_in_module[node] - place_in_module[source]}"
    return "elsewhere"


def _called(module: fx.GraphModule, node: fx.Node) -> str:
    """Return what `node` calls: the name of a function or method, a module with its settings."""
    if node.op != "call_module":
        return node.target if isinstance(node.target, str) else qualified_name(node.target)
    leaf = module.get_submodule(str(node.target))
    # Without code, which has other bytes in each version of Python.
    settings = describe(leaf, lambda value: qualified_name(type(value)), code=False)
    return f"{node.target}={settings}"


def _argument_text(arguments: Any, inputs: Mapping[fx.Node, str] | None = None) -> str:
    """Return arguments as text; nodes are written as in `inputs`, or without it by name.

    Objects that print their address are named by their type, and all devices are one.
    """

    def plain(item: Any) -> Any:
        if inputs is not None and isinstance(item, fx.Node):
            return inputs[item]
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
