"""Nested values: tuples, lists, dicts and dataclasses that a forward passes between its calls.

Unlike torch's pytrees this needs no registration, and it keeps how each item is read, which is what
the graph of a recorded call needs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

__all__ = ["contains_tensor", "hides_tensors", "items_of", "tensors_in"]


def items_of(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """Yield (reader, key, item) for the items of a collection: `reader(value, key)` is the item."""
    if isinstance(value, (tuple, list)):
        yield from ((operator.getitem, index, item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    # The class itself is a dataclass too, for `is_dataclass`.
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field may be unset, if the class fills it later (`init=False`).
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((getattr, name, getattr(value, name, None)) for name in names)


def contains_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor or holds one at any depth."""
    return isinstance(value, Tensor) or any(contains_tensor(item) for _, _, item in items_of(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, at any depth; the bounds of slices are searched too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    else:
        for _, _, item in items_of(value):
            yield from tensors_in(item)


def hides_tensors(value: Any) -> bool:
    """Return whether `value` is an object with tensors that no node could pass to it."""
    attributes = (*getattr(value, "__dict__", {}).values(), *_in_slots(value))
    return contains_tensor(value) or any(map(contains_tensor, attributes))


def _in_slots(value: Any) -> Iterator[Any]:
    """Yield what an object has in the `__slots__` of its classes."""
    for base in type(value).__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, MemberDescriptorType):
                yield getattr(value, name, None)
