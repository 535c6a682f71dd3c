"""What callables that are no modules hold, such as a loss that counts its calls or a hook that
collects norms: put back after a block that calls them.

    class Warmup:                       def averaged():
        calls = 0                           mean = torch.ones(())
        def __call__(self, out, y):         def loss(out, y):
            self.calls += 1                     mean.lerp_(out.mean(), 0.1)      what it encloses

So are the globals that functions of the user name, and what classes of the user have.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipecompile.frontend.code_names import names_in
from pipecompile.frontend.found_attributes import attributes_of, slots_in
from pipecompile.frontend.packages import has_own_attributes, is_of_others, package_of
from pipecompile.graph.attributes import CONTAINERS, PLAIN, plain_container, restore_items
from pipecompile.graph.model_state import has_values
from pipecompile.graph.restored_state import is_same_tensor

__all__ = ["callable_restored"]

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
MOST_ITEMS = 1024
"""Of a larger container only the items are put back, and not what is in them."""

MOST_BYTES = 2**26
"""Larger tensors are data rather than state, and take too much memory twice."""


@contextlib.contextmanager
def callable_restored(*functions: object) -> Iterator[None]:
    """Put back, after the block, what `functions` hold: tensors, attributes, globals, what they
    enclose, and the states of random generators.
    """
    state = _CallableState(functions)
    try:
        yield
    finally:
        state.restore()


class _CallableState:
    """Containers, cells, classes, globals and tensors, each with what it held when it was added."""

    def __init__(self, functions: Iterable[object]) -> None:
        self._seen = dict[int, Any]()
        self._pending = deque(functions)
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._of_classes: list[tuple[type, str, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._slots: list[tuple[Any, MemberDescriptorType, Any]] = []
        # Those of Python and numpy themselves need no name to be drawn from.
        self._generators: list[tuple[Callable[[Any], object], Any]] = [
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state()),
        ]
        while self._pending:
            self._add(self._pending.popleft())

    def _add(self, value: Any) -> None:
        """Note what `value` holds, and that it has to be looked at too."""
        if isinstance(value, (*PLAIN, ModuleType)) or id(value) in self._seen:
            return
        # The object itself is kept too, so that no other one gets its id.
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if has_values(value) and value.nbytes <= MOST_BYTES:
                self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, nn.Module):
            # Its parameters are not written to by a loss.
            self._pending.extend(value.buffers())
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._add_container(value)
        elif isinstance(value, GENERATORS):
            self._add_generator(value)
        else:
            self._add_parts(value)

    def _add_container(self, value: Any) -> None:
        items = plain_container(value)
        if isinstance(value, CONTAINERS):
            self._containers.append((value, items))
        if len(items) <= MOST_ITEMS:
            self._pending.extend(items.values() if isinstance(items, dict) else items)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                # A name that is set later has none yet.
                with contextlib.suppress(ValueError):
                    self._cells.append((cell, cell.cell_contents))
                    self._pending.append(cell.cell_contents)
            self._pending.extend((value.__dict__, value.__defaults__, value.__kwdefaults__))
            self._add_globals(value)
        elif isinstance(value, MethodType):
            self._pending.extend((value.__self__, value.__func__))
        elif isinstance(value, partial):
            self._pending.extend((value.func, value.args, value.keywords))
        elif package_of(type(value).__module__) == package_of(__name__):
            return  # a pipeline that was compiled earlier
        elif has_own_attributes(value, ()):
            self._pending.extend((attributes_of(value), type(value)))
            self._add_slots(value)

    def _add_slots(self, value: Any) -> None:
        # Those of Python's own classes may be read only.
        for kind in (each for each in type(value).__mro__ if "__slots__" in vars(each)):
            for slot in slots_in(vars(kind)).values():
                with contextlib.suppress(AttributeError):  # one may be unset
                    self._slots.append((value, slot, slot.__get__(value)))
                    self._pending.append(slot.__get__(value))

    def _add_generator(self, value: Any) -> None:
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._generators.append((partial(setattr, bits, "state"), bits.state))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        else:
            self._generators.append((value.set_state, value.get_state()))

    def _add_class(self, kind: type) -> None:
        if not _is_of_user(kind.__module__):
            return
        for name, value in vars(kind).items():
            if not name.startswith("__") or isinstance(value, FunctionType):
                self._of_classes.append((kind, name, value))
                self._pending.append(value)

    def _add_globals(self, function: FunctionType) -> None:
        if not _is_of_user(function.__module__):
            return
        namespace = function.__globals__
        for name in names_in(function.__code__).globals & namespace.keys():
            self._globals.append((namespace, name, namespace[name]))
            self._pending.append(namespace[name])

    def restore(self) -> None:
        """Give everything what it held."""
        for container, items in self._containers:
            restore_items(container, items)
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for value, slot, contents in self._slots:
            slot.__set__(value, contents)
        for set_state, state in self._generators:
            set_state(state)
        for kind, name, value in self._of_classes:
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)
        for namespace, name, value in self._globals:
            namespace[name] = value
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not is_same_tensor(tensor, value):
                    tensor.copy_(value)


def _is_of_user(module: str | None) -> bool:
    """Return whether a Python module is not installed, nor a part of this package where that is
    not.
    """
    return not is_of_others(module) and package_of(module) != package_of(__name__)
