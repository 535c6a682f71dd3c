"""Storages of tensors: which tensors share one, and how many bytes tensors take."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["size_bytes", "storage_key"]


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that are views of one storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def size_bytes(values: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of `values`; elements that tensors share count for each."""
    return sum(value.numel() * value.element_size() for value in values)
