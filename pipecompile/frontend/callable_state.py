"""What callables hold, such as a loss that counts its calls or a hook that collects norms: put back
after a block that calls them.

    class Warmup:                       def averaged():
        calls = 0                           mean = torch.ones(())
        def __call__(self, out, y):         def loss(out, y):
            self.calls += 1                     mean.lerp_(out.mean(), 0.1)      what it encloses

So are the globals that functions of the user name, what classes of the user have, and modules with
all that is in them.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cached_property, partial, partialmethod
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from pipecompile.frontend.code_names import names_in, stored_globals
from pipecompile.frontend.found_attributes import attributes_of, slots_in
from pipecompile.frontend.held_state import (
    GENERATORS,
    Restore,
    in_array,
    in_cache,
    in_cell,
    in_class,
    in_container,
    in_context_variable,
    in_generator,
    in_slot,
    in_table,
    in_tensor,
)
from pipecompile.frontend.packages import NAMESPACES, is_of_others, package_of
from pipecompile.graph.attributes import CONTAINERS, PLAIN, plain_container
from pipecompile.graph.model_state import has_values
from pipecompile.graph.storages import is_irregular

__all__ = ["callable_restored", "can_be_restored", "reached_by", "restored_after_failure"]

HOLDS_NOTHING: tuple[Any, ...] = (*PLAIN, ModuleType, *weakref.ProxyTypes)
PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__closure__", "__dict__", "__defaults__", "__kwdefaults__"),
    MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    partialmethod: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    cached_property: ("func",),
    _lru_cache_wrapper: ("__wrapped__",),
}
"""What callables of Python itself, and what stands for them in a class, are made of."""
HOLDING_ATTRIBUTES = {*NAMESPACES, "collections"}
"""Parts of the standard library whose objects hold what a user gives them in attributes, as
`UserDict` does.
"""
SHARED = frozenset({"ctypes", "multiprocessing", "queue", "_queue"})
"""Parts of the standard library whose objects hold values that nobody can put back."""
OF_ITEMS = (*CONTAINERS, OrderedDict, tuple)
MOST_ITEMS = 1024
"""Of a larger container only the items are put back, and not what is in them."""

MOST_BYTES = 2**26
"""Tensors and arrays that are larger, each or the farther ones together, are data rather than
state, and take too much memory twice. So do parameters and gradients that together are larger:
they are those of a model, to which no loss writes.
"""


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


def can_be_restored(function: object) -> bool:
    """Return whether `callable_restored` can put back all that a function holds: not what it moves
    on for good, such as an iterator of Python or a file.
    """
    return _CallableState([function], copies=False).is_complete


def reached_by(function: object) -> Iterable[object]:
    """Return the objects that a function, or the code of a model, leads to."""
    return _CallableState([function], copies=False).reached


@contextlib.contextmanager
def restored_after_failure(model: nn.Module) -> Iterator[None]:
    """Put back what `model` and its code hold, as `callable_restored` does, if the block fails.

    After a block that succeeds, what it has read must be the same objects as before.
    """
    state = _CallableState([model])
    try:
        yield
    except BaseException:
        state.restore()
        raise


class _CallableState:
    """All that callables hold, found from one thing to the next, with what puts it back."""

    def __init__(self, functions: Iterable[object], *, copies: bool = True) -> None:
        self._holds_lasting = False
        # Names of attributes that hold what changes for good, and in the code of functions; in that
        # of methods by their own name, since not all of a class need be called.
        self._lasting_names = set[str]()
        self._code_names = {"__call__", "forward"}
        self._names_of_methods = defaultdict[str, set[str]](set)
        self._methods = set[int]()
        self._seen = dict[int, Any]()
        # The nearest first: they are state more likely than what those lead to.
        self._pending = deque(functions)
        room = MOST_BYTES if copies else 0
        self._room = {"parameters": room, "others": room}
        # The generators of Python and numpy themselves need no name to be drawn from.
        self._restores: list[Restore] = [
            partial(torch.set_default_dtype, torch.get_default_dtype()),
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]
        while self._pending:
            self._add(self._pending.popleft())

    @property
    def reached(self) -> Iterable[object]:
        """The objects that were found, but for plain ones."""
        return self._seen.values()

    @property
    def is_complete(self) -> bool:
        """Whether all that the callables may change can be put back."""
        names = set[str]()
        pending = set(self._code_names)
        while pending:
            names |= pending
            called = (self._names_of_methods[name] for name in pending)
            pending = set[str]().union(*called) - names
        return not self._holds_lasting and self._lasting_names.isdisjoint(names)

    def restore(self) -> None:
        """Give everything what it held."""
        for restore in self._restores:
            # What cannot be written to stays as it is, and keeps nothing else from being put back.
            with contextlib.suppress(Exception):
                restore()

    def _add(self, value: Any) -> None:
        """Note what `value` holds, and that it has to be looked at too."""
        # `isinstance` would ask the object, which may be a proxy of another one, or fail.
        kind = type(value)
        if issubclass(kind, HOLDS_NOTHING) or id(value) in self._seen:
            return
        # The object itself is kept too, so that no other one gets its id.
        self._seen[id(value)] = value
        if _lasts(value):
            self._holds_lasting = True
        if issubclass(kind, Tensor):
            self._add_tensor(value, is_parameter=isinstance(value, nn.Parameter))
        elif issubclass(kind, np.ndarray):
            if self._has_room("others", value.nbytes):
                self._restores.append(in_array(value))
        elif issubclass(kind, type):
            self._add_class(value)
        elif issubclass(kind, CellType):
            self._restores.append(in_cell(value))
            with contextlib.suppress(ValueError):  # it may be empty
                self._pending.append(value.cell_contents)
        elif issubclass(kind, GENERATORS):
            self._restores.append(in_generator(value))
        else:
            if issubclass(kind, OF_ITEMS):
                self._add_container(value)
            if kind not in OF_ITEMS:
                self._add_object(value)

    def _add_tensor(self, tensor: Tensor, *, is_parameter: bool) -> None:
        self._pending.append(vars(tensor))  # what a user has set on it
        if not has_values(tensor) or is_irregular(tensor) or is_lazy(tensor):
            return
        fits = self._has_room("parameters" if is_parameter else "others", tensor.nbytes)
        self._restores.append(in_tensor(tensor, with_values=fits))
        if tensor.is_leaf and tensor.grad is not None:
            self._add_tensor(tensor.grad, is_parameter=True)

    def _has_room(self, kind: str, size: int) -> bool:
        """Return whether so many bytes may be copied; they are counted then."""
        if size > self._room[kind]:
            return False
        self._room[kind] -= size
        return True

    def _add_container(self, value: Any) -> None:
        items = plain_container(value)
        if items is not value:  # it is no tuple
            self._restores.append(in_container(value, items))
        if len(items) <= MOST_ITEMS:
            self._pending.extend(items.values() if isinstance(items, dict) else items)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        for owner, names in PARTS.items():
            if issubclass(kind, owner):
                self._pending.extend(getattr(value, name) for name in names)
        if issubclass(kind, FunctionType):
            self._add_globals(value)
        elif issubclass(kind, _lru_cache_wrapper):
            self._restores.append(in_cache(value))
        if issubclass(kind, nn.Module):
            self._add_module(value)
        elif issubclass(kind, ContextVar):
            self._restores.append(in_context_variable(value))
            self._pending.append(value.get(None))
        elif kind.__module__ in HOLDING_ATTRIBUTES or _is_of_user(kind.__module__):
            self._add_attributes(value)

    def _add_module(self, module: nn.Module) -> None:
        # The first call of a lazy module makes it another one, for good.
        if isinstance(module, LazyModuleMixin) or _is_own(type(module).__module__):
            return
        self._add_attributes(module)
        # A scripted module has them in no table.
        self._pending.extend(module.children())
        self._pending.extend(module.parameters(recurse=False))
        self._pending.extend(module.buffers(recurse=False))

    def _add_attributes(self, value: Any) -> None:
        """Note the attributes and slots of an object, and that its class is to be looked at."""
        kind, attributes = type(value), attributes_of(value)
        self._pending.extend((attributes, kind))
        # A trainer may hold a loader's iterator that its loss knows nothing of.
        for name, held in attributes.items():
            if _lasts(held):
                self._lasting_names.add(str(name))
                self._seen[id(held)] = held
        # Those of Python's own classes may be read only.
        for owner in (each for each in kind.__mro__ if "__slots__" in vars(each)):
            for slot in slots_in(vars(owner)).values():
                self._restores.append(in_slot(value, slot))
                with contextlib.suppress(AttributeError):  # it may be unset
                    self._pending.append(slot.__get__(value))

    def _add_class(self, kind: type) -> None:
        if _is_of_user(kind.__module__):
            self._restores.append(in_class(kind))
            self._pending.extend(vars(kind).values())
            for name, each in vars(kind).items():
                if isinstance(each, FunctionType):
                    self._methods.add(id(each))
                    self._names_of_methods[name] |= names_in(each.__code__).names
            self._pending.extend(kind.__bases__)

    def _add_globals(self, function: FunctionType) -> None:
        if not _is_of_user(function.__module__):
            return
        table, code = function.__globals__, function.__code__
        names = names_in(code)
        if id(function) not in self._methods:
            self._code_names |= names.names
        self._add_items(table, stored_globals(code) | (names.globals & table.keys()))
        for name in names.globals:
            module: Any = table.get(name)
            if issubclass(type(module), ModuleType) and _is_of_user(module.__name__):
                self._add_items(vars(module), names.names & vars(module).keys())

    def _add_items(self, table: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self._restores.append(in_table(table, name))
            self._pending.append(table.get(name))


def _lasts(value: Any) -> bool:
    """Return whether an object changes for good: iterators, files, shared memory."""
    if value is sys.stdout or value is sys.stderr:  # what is printed changes nothing
        return False
    kind = type(value)
    # An iterator of the user's has its place in an attribute.
    is_lasting = issubclass(kind, Iterator) or package_of(kind.__module__) in SHARED
    return is_lasting and not _is_of_user(kind.__module__)


def _is_of_user(module: str | None) -> bool:
    """Return whether a Python module is not installed, nor a part of this package where that is
    not.
    """
    return not is_of_others(module) and not _is_own(module)


def _is_own(module: str | None) -> bool:
    """Return whether a Python module is of this package, as that of a pipeline compiled earlier."""
    return package_of(module) == package_of(__name__)
