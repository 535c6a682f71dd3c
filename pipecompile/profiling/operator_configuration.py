"""What a node does, apart from its tensors: the name of its operator, and its configuration."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import resolve_name

__all__ = ["configuration", "operator_name"]

_SCALARS = (bool, int, float, str, tuple, type(None))


def operator_name(node: fx.Node, root: nn.Module) -> str:
    """Return the node's operator as a user knows it.

    For example "torch.nn.Linear", "torch.matmul", "Tensor.view" or "operator.getitem".
    """
    if node.op == "call_module":
        return _type_name(type(root.get_submodule(str(node.target))))
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "call_function":
        return _function_name(node.target)
    return node.op


def configuration(node: fx.Node, root: nn.Module, leaves: Iterable[Any]) -> Hashable:
    """Return what decides the cost of `node` besides its tensors; `leaves` are its flat arguments.

    It is the function, the settings of all modules inside, the constants and the autograd context.
    """
    # An empty module has the same settings for every node that calls none.
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()
    function = node.target if node.op == "call_function" else None
    constants = tuple("" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (
        function,
        tuple(map(_settings, module.modules())),
        constants,
        repr(node.meta.get("autograd_context")),
    )


def _settings(module: nn.Module) -> Hashable:
    # `extra_repr` leaves out what it likes, and many modules of users have none.
    scalars = {name: value for name, value in vars(module).items() if isinstance(value, _SCALARS)}
    return _type_name(type(module)), module.extra_repr(), repr(scalars)


def _type_name(kind: type) -> str:
    if getattr(torch.nn, kind.__name__, None) is kind:
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _function_name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{_type_name(owner)}.{function.__name__}"
    public_name: str | None = resolve_name(function)
    if public_name is not None:
        return public_name
    # `operator.getitem` says that it is of `_operator`, where it is written in C.
    return f"{function.__module__.lstrip('_')}.{function.__qualname__}"
