"""What callables that are no modules hold, such as a loss that counts its calls or a hook that
collects norms: put back after a block that calls them.

    class Warmup:                       def averaged():
        calls = 0                           mean = torch.ones(())
        def __call__(self, out, y):         def loss(out, y):
            self.calls += 1                     mean.lerp_(out.mean(), 0.1)      what it encloses

So are the globals that functions of the user name. Attributes of classes are not put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.frontend.code_names import names_in
from pipecompile.frontend.packages import has_own_attributes, is_of_others
from pipecompile.graph.attributes import CONTAINERS, PLAIN, plain_container, restore_items
from pipecompile.graph.model_state import has_values
from pipecompile.graph.restored_state import is_same_tensor

__all__ = ["callable_restored"]

MOST_ITEMS = 1024
"""Of a larger container only the items are put back, and not what is in them."""

MOST_BYTES = 2**26
"""Larger tensors are data rather than state, and take too much memory twice."""


@contextlib.contextmanager
def callable_restored(*functions: object) -> Iterator[None]:
    """Put back, after the block, what `functions` hold: tensors, attributes, globals, what they
    enclose.
    """
    state = _CallableState()
    for function in functions:
        state.add(function)
    try:
        yield
    finally:
        state.restore()


class _CallableState:
    """Containers, cells, globals and tensors, each with what it held when it was added."""

    def __init__(self) -> None:
        self._seen = dict[int, Any]()
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []

    def add(self, value: Any) -> None:
        """Note what `value` holds, and what that holds."""
        if isinstance(value, (*PLAIN, type, ModuleType)) or id(value) in self._seen:
            return
        # The object itself is kept too, so that no other one gets its id.
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if has_values(value) and value.nbytes <= MOST_BYTES:
                self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, nn.Module):
            # Its parameters are not written to by a loss.
            self._add_all(value.buffers())
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._add_container(value)
        else:
            self._add_parts(value)

    def _add_container(self, value: Any) -> None:
        items = plain_container(value)
        if isinstance(value, CONTAINERS):
            self._containers.append((value, items))
        if len(items) <= MOST_ITEMS:
            self._add_all(items.values() if isinstance(items, dict) else items)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                # A name that is set later has none yet.
                with contextlib.suppress(ValueError):
                    self._cells.append((cell, cell.cell_contents))
                    self.add(cell.cell_contents)
            self._add_all((value.__dict__, value.__defaults__, value.__kwdefaults__))
            self._add_globals(value)
        elif isinstance(value, MethodType):
            self._add_all((value.__self__, value.__func__))
        elif isinstance(value, partial):
            self._add_all((value.func, value.args, value.keywords))
        elif has_own_attributes(value, ()) and hasattr(value, "__dict__"):
            self.add(vars(value))

    def _add_globals(self, function: FunctionType) -> None:
        if is_of_others(function.__module__):
            return
        namespace = function.__globals__
        for name in names_in(function.__code__).globals & namespace.keys():
            self._globals.append((namespace, name, namespace[name]))
            self.add(namespace[name])

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def restore(self) -> None:
        """Give everything what it held."""
        for container, items in self._containers:
            restore_items(container, items)
        for cell, contents in self._cells:
            cell.cell_contents = contents
        for namespace, name, value in self._globals:
            namespace[name] = value
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not is_same_tensor(tensor, value):
                    tensor.copy_(value)
