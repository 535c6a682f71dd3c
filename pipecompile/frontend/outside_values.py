"""What a forward reads and calls besides what its modules hold: globals, attributes of classes and
of objects, functions and methods, the classes of modules.

A graph has these in it as they were at the capture. They are found by name, without running
anything, in the code of the forward and of all that it may call:

    def forward(self, x):
        return helper(x) * self.config.scale      names: helper, config, scale

    helper             a function: its names are read too
    self.config        an object: of its attributes those whose names are read, here `scale`
    Model.scale        likewise of classes; and of functions their globals, what they enclose and
                       their defaults
    os.environ         of a function that reads it: the variables that its strings name

So more may be found than is read, but nothing that changes during training is likely among it.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import call, is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from pipecompile.graph.attributes import CONTAINERS, PLAIN, deep_copy, is_same_value

__all__ = ["OutsideValues"]

FOREIGN = frozenset({"torch", "numpy"})
"""Packages whose code and objects are not followed, besides the standard library."""
MOST_ITEMS = 64
"""Of a larger container only the identity is compared."""
COMPARED = (*PLAIN, *CONTAINERS, tuple, Tensor)
CODE = (FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property, partial)
"""Of what runs only the identity is compared."""
ENVIRONMENT = frozenset({"environ", "getenv"})
GONE = object()

Read = Callable[[], Any]
"""Returns what is in a place now, `GONE` if nothing is."""


@dataclass(frozen=True)
class _OutsideValue:
    """What was in a place, with a copy if it is a container."""

    where: str
    read: Read
    value: Any
    copy: Any

    @property
    def is_the_same(self) -> bool:
        now = self.read()
        if now is not self.value or not isinstance(now, CONTAINERS) or len(now) > MOST_ITEMS:
            return is_same_value(now, self.value)
        return is_same_value(deep_copy(now), self.copy)


class OutsideValues:
    """The values that the forward of a model may read now, besides what its modules hold
    themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        search = _NameSearch(model)
        self._values = search.values
        self._code_places = [where for where, _, _ in search.code]
        self._code_reads = [read for _, read, _ in search.code]
        self._code = [value for _, _, value in search.code]
        self._named_modules = list(model.named_modules())
        self._modules = [module for _, module in self._named_modules]
        self._kinds = list(map(type, self._modules))

    def changed(self) -> str | None:
        """Return where there is something else now; None if all is the same."""
        # There are many functions and modules, so they are compared without loops in Python.
        if not all(map(is_, map(call, self._code_reads), self._code)):
            code = zip(self._code_places, self._code_reads, self._code, strict=True)
            return next(where for where, read, value in code if read() is not value)
        if list(map(type, self._modules)) != self._kinds and (place := self._other_class()):
            return place
        return next((each.where for each in self._values if not each.is_the_same), None)

    def _other_class(self) -> str | None:
        """Return which module has another class of its own; torch may have put one around it."""
        for (path, module), kind in zip(self._named_modules, self._kinds, strict=True):
            if _own_class(type(module)) is not _own_class(kind):
                return f"the class of {path}" if path else "the class of the model"
        return None


class _NameSearch:
    """Follows the names in functions to values and to other functions.

    A name of a function is looked up among its globals, what it encloses, and the attributes of
    objects, classes and Python modules that it reaches by these names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: list[_OutsideValue] = []
        self.code: list[tuple[str, Read, Any]] = []
        self._seen: set[tuple[int, frozenset[str]]] = set()
        self._class_names: dict[tuple[type, frozenset[str]], frozenset[str]] = {}
        for path, module in model.named_modules():
            names = self._look_in_class(type(module), frozenset({"forward"}))
            # The attributes themselves are compared by the modules' owner.
            for name in names & vars(module).keys():
                self._follow(f"{path}.{name}".lstrip("."), vars(module)[name], names)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._follow("a hook", hook, names)

    def _look(self, where: str, read: Read, names: frozenset[str]) -> None:
        """Note what is in a place that a function reads, and follow it."""
        value = read()
        if isinstance(value, COMPARED):
            self.values.append(_OutsideValue(where, read, value, deep_copy(value)))
        elif isinstance(value, CODE):
            self.code.append((where, read, value))
        self._follow(where, value, names)

    def _look_among(self, where: str, items: Mapping[str, Any], names: frozenset[str]) -> None:
        for name in names & items.keys():
            self._look(f"{where}.{name}", partial(items.get, name, GONE), names)

    def _follow(self, where: str, value: Any, names: frozenset[str]) -> None:
        """Look up in `value` the names that a function reads which can reach it."""
        value = _unwrapped(value)
        if isinstance(value, FunctionType):
            self._look_in_function(value)
        elif isinstance(value, type):
            self._look_in_class(value, names)
        elif _is_owner(value) and (id(value), names) not in self._seen:
            self._seen.add((id(value), names))
            if not isinstance(value, ModuleType):
                names = self._look_in_class(type(value), names)
            self._look_among(where, vars(value), names)

    def _look_in_function(self, function: FunctionType) -> None:
        code, names = function.__code__, _names(function.__code__)
        if (id(function), names) in self._seen or _is_foreign(function.__module__):
            return
        self._seen.add((id(function), names))
        self._look_among(function.__module__, function.__globals__, names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            where = f"{name} in {function.__qualname__}"
            self._look(where, partial(_content, cell), names)
        # Who calls a function without defaults gives all arguments, whatever it has later.
        for part in ("__defaults__", "__kwdefaults__"):
            where, read = f"{part} of {function.__qualname__}", partial(getattr, function, part)
            if read():
                self.code.append((where, read, read()))
        if names & ENVIRONMENT:
            for name in _strings(code):
                self._look(f"os.environ[{name!r}]", partial(os.environ.get, name), frozenset())

    def _look_in_class(self, kind: type, names: frozenset[str]) -> frozenset[str]:
        """Return the names with those that the methods of these names read, and so on."""
        key = (kind, names)
        if key not in self._class_names:
            self._class_names[key] = names  # for classes that reach themselves
            bases = [base for base in kind.__mro__ if not _is_foreign(base.__module__)]
            before: frozenset[str] = frozenset()
            while before != names:
                new, before = names - before, names
                for base in bases:
                    for name in new & vars(base).keys():
                        method = _unwrapped(vars(base)[name])
                        if isinstance(method, FunctionType):
                            names |= _names(method.__code__)
            for base in bases:
                self._look_among(base.__qualname__, vars(base), names)
            self._class_names[key] = names
        return self._class_names[key]


def _unwrapped(value: Any) -> Any:
    """Return the function in a method, a property or a partial call of it; else `value`."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, partial) else value


def _is_owner(value: Any) -> bool:
    """Return whether `value` is an object or a Python module of the user, with attributes."""
    if isinstance(value, ModuleType):
        return not _is_foreign(value.__name__)
    # What modules hold is compared by itself. Namespaces of the standard library are read, too.
    is_other = isinstance(value, (nn.Module, *COMPARED))
    return (
        hasattr(value, "__dict__")
        and not is_other
        and type(value).__module__.partition(".")[0] not in FOREIGN
    )


def _own_class(kind: type) -> type:
    """Return a class of modules; the one inside, if torch made a class around it."""
    own: Iterator[type] = (base for base in kind.__mro__ if not _is_foreign(base.__module__))
    # Modules of torch itself run as they are.
    return next(own, nn.Module)


def _is_foreign(module: str | None) -> bool:
    package = (module or "builtins").partition(".")[0]
    return package in FOREIGN or package in sys.stdlib_module_names


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that `code` reads, of globals and of attributes, with functions in it."""
    read = (each for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    names = {each.argval for each in read if each.argval in code.co_names}
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(names.union(*inner))


def _strings(code: CodeType) -> list[str]:
    """Return the strings in `code` that may name a variable of the environment."""
    return [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return GONE
