"""Pytrees: nested tuples, lists, dicts and dataclasses with tensors as leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

__all__ = [
    "is_size",
    "leaves_with_paths",
    "map_tensors",
    "register_dataclasses",
    "tensor_leaves",
]

Path = tuple[Any, ...]
"""The keys on the way to a leaf; `pytree.keystr` writes them."""


def tensor_leaves(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors among the leaves of a pytree, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def is_size(value: Any) -> bool:
    """Return whether a value is a size, which torch takes for a node and makes a tuple of again."""
    return isinstance(value, torch.Size)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a pytree with `function` applied to its tensors; sizes in it stay as they are."""
    return pytree.tree_map_only(Tensor, function, value, is_leaf=is_size)


def leaves_with_paths(
    value: Any, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a pytree, in order, and the way to each.

    Torch's own function fails on kinds of nodes that were registered without keys, as those of
    diffusers are; their items are numbered here.
    """
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
    if node is None or (is_leaf is not None and is_leaf(value)):
        yield path, value
        return
    pairs: Iterable[tuple[Any, Any]]
    if node.flatten_with_keys_fn is None:
        items = enumerate(node.flatten_fn(value)[0])
        pairs = ((pytree.SequenceKey(number), item) for number, item in items)
    else:
        pairs = node.flatten_with_keys_fn(value)[0]
    for key, item in pairs:
        yield from leaves_with_paths(item, is_leaf, (*path, key))


def register_dataclasses(value: Any) -> None:
    """Register every dataclass in the pytree `value` with torch.

    Torch takes an unregistered dataclass for a leaf, and so would not see the tensors in it.
    """
    if isinstance(value, (tuple, list)):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # It may have been registered by its library, perhaps in another way; twice is an error.
        if type(value) not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(type(value))
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    for item in items:
        register_dataclasses(item)
