"""A value outside the modules that a forward may read, and whether it has changed since."""

from __future__ import annotations

from array import array
from collections import ChainMap, UserDict
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from pipecompile.frontend.places import GONE, Read
from pipecompile.graph.attributes import CONTAINERS, PLAIN, deep_copy, is_same_value

__all__ = [
    "COMPARED",
    "MAPPINGS",
    "MOST_COMPARED",
    "MOST_ITEMS",
    "NUMBERS",
    "ComparedValue",
    "comparable",
    "content",
    "itself",
    "referent",
]

MOST_ITEMS = 1024
"""What is in a larger container is not followed."""
MOST_COMPARED = 2**16
"""Of a larger container or array only the identity is compared."""
MAPPINGS = (MappingProxyType, UserDict, ChainMap)
BUFFERS = (bytearray, array, memoryview)
ARRAYS = (numpy.ndarray, numpy.generic)
NUMBERS = (*ARRAYS, *BUFFERS)
COMPARED = (*PLAIN, *CONTAINERS, *MAPPINGS, *NUMBERS, tuple, Tensor)
"""Of all else, such as functions and objects, only the identity is compared."""


@dataclass(frozen=True)
class ComparedValue:
    """The `value` that a place had, and `before`, a copy that shows changes of it in place."""

    where: str
    read: Read
    value: Any
    before: Any

    @property
    def is_the_same(self) -> bool:
        """Whether the place has that value still, and nothing in it has changed."""
        now = self.read()
        if now is self.value is self.before:  # it cannot change in place
            return True
        return is_same_value(comparable(now), self.before)


def comparable(value: Any) -> Any:
    """Return a copy or a form of a value that `is_same_value` compares to find any change of it."""
    if isinstance(value, (*CONTAINERS, tuple)):
        return deep_copy(value) if len(value) <= MOST_COMPARED else value
    if isinstance(value, BUFFERS):
        view = memoryview(value)
        is_small = view.nbytes <= MOST_COMPARED * view.itemsize
        return (view.format, view.shape, view.tobytes()) if is_small else value
    if isinstance(value, ARRAYS) and value.size <= MOST_COMPARED:
        # As bytes, of which NaN equals itself.
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, MAPPINGS) and len(value) <= MOST_COMPARED:
        return deep_copy(dict(value))
    # Saving a model of transformers makes the name of a type of it.
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def itself(value: Any) -> Any:
    """Return the value itself: the `Read` of an item that a container keeps."""
    return value


def referent(proxy: Any) -> Any:
    """Return what a weak proxy stands for, `GONE` if that is gone."""
    with suppress(ReferenceError):
        # A proxy passes all attributes on, so this method is bound to the object itself.
        return proxy.__repr__.__self__
    return GONE


def content(cell: CellType) -> Any:
    """Return what a function encloses in `cell`, `GONE` if nothing has been assigned yet."""
    with suppress(ValueError):
        return cell.cell_contents
    return GONE
