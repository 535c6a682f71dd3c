"""Storages of tensors: which tensors share one, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["size_bytes", "storage_key", "tensors"]


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that are views of one storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def size_bytes(values: Iterable[Tensor]) -> int:
    """The bytes of the elements of `values`, each tensor by itself, whatever storage they share."""
    return sum(value.numel() * value.element_size() for value in values)


def tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors in a nested value, in order."""
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
