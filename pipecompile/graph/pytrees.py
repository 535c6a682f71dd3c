"""Pytrees: nested tuples, lists, dicts and dataclasses with tensors as leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

__all__ = ["register_dataclasses", "tensor_leaves"]


def tensor_leaves(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors among the leaves of a pytree, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def register_dataclasses(value: Any) -> None:
    """Register every dataclass in the pytree `value` with torch.

    Torch takes an unregistered dataclass for a leaf, and so would not see the tensors in it.
    """
    if isinstance(value, (tuple, list)):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(type(value))
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    for item in items:
        register_dataclasses(item)
