"""What a thing holds at one moment, as a function that puts it back: tensors, arrays, containers,
cells, slots, classes, random generators and caches.

Each function here returns such a function. It writes to nothing that still holds the same.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipecompile.graph.attributes import ABSENT, CONTAINERS, plain_container
from pipecompile.graph.restored_state import is_same_tensor

__all__ = [
    "GENERATORS",
    "Restore",
    "in_array",
    "in_cache",
    "in_cell",
    "in_class",
    "in_container",
    "in_context_variable",
    "in_generator",
    "in_slot",
    "in_table",
    "in_tensor",
]

Restore = Callable[[], object]
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@dataclass(frozen=True)
class _HeldTensor:
    """What a tensor was: `place` is its memory and shape, and `values` a copy of its elements, or
    None where these are too many.
    """

    tensor: Tensor
    place: Tensor
    values: Tensor | None
    gradient: Tensor | None
    requires_grad: bool
    is_leaf: bool

    def restore(self) -> None:
        # Elsewhere nothing may write to an inference tensor.
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self._restore_values()
        if self.is_leaf:
            if self.tensor.requires_grad != self.requires_grad:
                self.tensor.requires_grad_(self.requires_grad)
            if self.tensor.grad is not self.gradient:
                self.tensor.grad = self.gradient

    def _restore_values(self) -> None:
        tensor, place = self.tensor, self.place
        # What has a gradient was written to it. Torch detaches no view in place.
        if self.is_leaf and not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        if tensor.shape != place.shape or tensor.data_ptr() != place.data_ptr():
            tensor.data = place
        if self.values is not None and not is_same_tensor(tensor, self.values):
            tensor.copy_(self.values)


def in_tensor(tensor: Tensor, *, with_values: bool) -> Restore:
    """Put back shape, memory and gradient of a tensor, and its elements `with_values`."""
    values = tensor.detach().clone() if with_values else None
    # Torch warns of the gradient of a tensor that is no leaf.
    gradient = tensor.grad if tensor.is_leaf else None
    held = _HeldTensor(
        tensor, tensor.detach(), values, gradient, tensor.requires_grad, tensor.is_leaf
    )
    return held.restore


def in_array(array: Any) -> Restore:
    """Put back the elements of an array of numpy."""
    values = array.copy()

    def restore() -> None:
        if not np.array_equal(array, values):
            np.copyto(array, values)

    return restore


def in_container(container: Any, items: Any) -> Restore:
    """Put back the items of a container, of which these are a copy."""

    def restore() -> None:
        now = plain_container(container)
        if len(now) != len(items) or not all(map(is_, _content(now), _content(items))):
            _refill(container, items)

    return restore


def _content(container: Any) -> Any:
    # Keys too, since code may iterate over them.
    return chain(container, container.values()) if isinstance(container, dict) else container


def _refill(container: Any, items: Any) -> None:
    """Fill a container by the methods of Python's own class: one below it may refuse what it is
    given, or do more.
    """
    kinds = (OrderedDict, *CONTAINERS)
    kind: Any = next(each for each in kinds if issubclass(type(container), each))
    kind.clear(container)
    if kind in (list, deque):
        kind.extend(container, items)
    else:
        kind.update(container, items)


def in_context_variable(variable: ContextVar[Any]) -> Restore:
    """Put back what a context variable has; Python cannot unset one."""
    value = variable.get(ABSENT)
    if value is ABSENT:
        with suppress(LookupError):  # it may have no default
            value = variable.get()

    def restore() -> None:
        if value is not ABSENT and variable.get() is not value:
            variable.set(value)

    return restore


def in_cell(cell: CellType) -> Restore:
    """Put back what a function encloses."""
    contents = _contents(cell)

    def restore() -> None:
        if contents is not ABSENT:
            cell.cell_contents = contents
        elif _contents(cell) is not ABSENT:
            del cell.cell_contents

    return restore


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is set later
        return ABSENT


def in_slot(owner: Any, slot: MemberDescriptorType) -> Restore:
    """Put back what an object has in a slot."""
    contents = _in_slot(owner, slot)

    def restore() -> None:
        if _in_slot(owner, slot) is contents:
            return
        if contents is ABSENT:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, contents)

    return restore


def _in_slot(owner: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # it is unset
        return ABSENT


def in_table(table: dict[str, Any], name: str) -> Restore:
    """Put back one item of a dict, such as that of the globals of a Python module."""
    value = table.get(name, ABSENT)

    def restore() -> None:
        if value is ABSENT:
            table.pop(name, None)
        elif table.get(name, ABSENT) is not value:
            table[name] = value

    return restore


def in_class(kind: type) -> Restore:
    """Put back the attributes of a class, but for those that Python keeps for itself."""
    before = _of_user(kind)

    def restore() -> None:
        # By the methods of `type`, since a class of classes may refuse this.
        now = _of_user(kind)
        for name in now.keys() - before.keys():
            type.__delattr__(kind, name)
        for name, value in before.items():
            if now.get(name, ABSENT) is not value:
                type.__setattr__(kind, name, value)

    return restore


def _of_user(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") or isinstance(value, FunctionType)
    }


def in_generator(generator: Any) -> Restore:
    """Put back the state of one of the `GENERATORS`."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.SystemRandom):
        return lambda: None  # it has no state
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def in_cache(cache: Any) -> Restore:
    """Empty a cache of functools again that is empty now. Of one that holds something no single
    result can be taken out.
    """
    is_empty = not cache.cache_info().currsize

    def restore() -> None:
        if is_empty and cache.cache_info().currsize:
            cache.cache_clear()

    return restore
