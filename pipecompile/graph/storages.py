"""Storages of tensors: which tensors share one, and how many bytes tensors take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["is_irregular", "layout_name", "size_bytes", "storage_key"]


def is_irregular(tensor: Tensor) -> bool:
    """Return whether a tensor is sparse or nested: it has no strides, or not one storage."""
    return tensor.layout is not torch.strided or tensor.is_nested


def layout_name(tensor: Tensor) -> str:
    """Return the layout of an irregular tensor in a word."""
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that are views of one storage."""
    # Of the storage in C++: each call makes a new object of Python for it.
    key: int = tensor.untyped_storage()._cdata
    return key


def size_bytes(values: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of `values`; elements that tensors share count for each."""
    return sum(value.numel() * value.element_size() for value in values)
