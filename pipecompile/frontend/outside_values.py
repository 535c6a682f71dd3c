"""What a forward reads and calls besides what its modules hold: globals, attributes of classes and
of objects, functions and methods, the classes of modules.

A graph has these in it as they were at the capture. They are found by name, without running
anything, in the code of the forward and of all that it may call:

    def forward(self, x):
        return helper(x, self.config) * table["scale"]
    def helper(x, config):
        return x * config.scale           names: helper, config, table, scale

    helper, table      globals of the function that names them: its names are read too
    self.config        an object: of its attributes those that any function names, here `scale`,
                       since a function may be given what another one has found
    Model.scale        likewise of classes, and of Python modules; of functions also what they
                       enclose and their defaults
    table              a container: its items, and what these lead to
    os.environ         of a function that reads it: the variables that its strings name

So more may be found than is read, but nothing that changes during training is likely among it.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import call, is_
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy
from torch import Tensor, nn

from pipecompile.graph.attributes import (
    CONTAINERS,
    PLAIN,
    ContainerItems,
    deep_copy,
    is_same_value,
)

__all__ = ["OutsideValues"]

FOREIGN = frozenset({"torch", "numpy"})
"""Packages whose code and objects are not followed, besides the standard library, and what is
installed but has no module of the model (a test runner, a progress bar).
"""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""
MOST_ITEMS = 64
"""Of a larger container only the identity is compared."""
MAPPINGS = (MappingProxyType, UserDict, ChainMap)
ARRAYS = (numpy.ndarray, numpy.generic)
COMPARED = (*PLAIN, *CONTAINERS, *MAPPINGS, *ARRAYS, tuple, Tensor)
"""Of all else, such as functions and objects, only the identity is compared."""
ENVIRONMENT = frozenset({"environ", "getenv"})
GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
BY_TEXT = frozenset({"getattr", "attrgetter", "vars", "globals", "__dict__"})
"""A function that names one of these may name attributes and globals by its strings."""
NOT_READING = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "set_name", "setattr", "delattr", "del"),
        *("repr", "str", "eq", "hash", "copy", "deepcopy", "reduce", "getstate", "setstate"),
    )
)
"""Special methods that a forward is not likely to call, unlike those of operators."""
NAMESPACES = frozenset({"types", "argparse", "_thread"})
"""Parts of the standard library whose objects hold what a user gives them."""
PARTS: Mapping[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    cached_property: ("func",),
    type(cache(len)): ("__wrapped__",),
    MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
}
"""Attributes of what leads to a function, which calls it with these."""
GONE = object()

Read = Callable[[], Any]
"""Returns what is in a place now, `GONE` if nothing is."""


@dataclass(frozen=True)
class _OutsideValue:
    """What was in a place, and what tells its changes in place."""

    where: str
    read: Read
    value: Any
    before: Any

    @property
    def is_the_same(self) -> bool:
        now = self.read()
        if now is self.value is self.before:  # it cannot change in place
            return True
        return is_same_value(_comparable(now), self.before)


def _comparable(value: Any) -> Any:
    """Return what `is_same_value` tells changes of a value by, also those in place."""
    if isinstance(value, (*CONTAINERS, tuple)):
        return deep_copy(value) if len(value) <= MOST_ITEMS else value
    if isinstance(value, ARRAYS) and value.size <= MOST_ITEMS:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, MAPPINGS) and len(value) <= MOST_ITEMS:
        return deep_copy(dict(value))
    return value


class OutsideValues:
    """The values that the forward of a model may read now, besides what its modules hold
    themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        search = _NameSearch(model)
        self._values = search.values
        self._reads = [each.read for each in search.values]
        self._objects = [each.value for each in search.values]
        small = (each for each in self._objects if isinstance(each, (*CONTAINERS, tuple)))
        self._containers = ContainerItems(each for each in small if len(each) <= MOST_ITEMS)
        self._read_each_time = [
            each for each in search.values if isinstance(each.value, (*ARRAYS, *MAPPINGS))
        ]
        self._code_places = [where for where, _, _ in search.code]
        self._code_reads = [read for _, read, _ in search.code]
        self._code = [value for _, _, value in search.code]
        self._named_modules = list(model.named_modules())
        self._modules = [module for _, module in self._named_modules]
        self._kinds = list(map(type, self._modules))

    def changed(self) -> str | None:
        """Return where there is something else now; None if all is the same."""
        # There are many of each, so they are first compared as objects, without loops in Python.
        if not all(map(is_, map(call, self._code_reads), self._code)):
            code = zip(self._code_places, self._code_reads, self._code, strict=True)
            return next(where for where, read, value in code if read() is not value)
        if list(map(type, self._modules)) != self._kinds and (place := self._other_class()):
            return place
        are_the_same = all(map(is_, map(call, self._reads), self._objects))
        suspects = self._values
        if are_the_same and self._containers.are_the_same():
            suspects = self._read_each_time
        return next((each.where for each in suspects if not each.is_the_same), None)

    def _other_class(self) -> str | None:
        """Return which module has another class of its own; torch may have put one around it."""
        for (path, module), kind in zip(self._named_modules, self._kinds, strict=True):
            if _own_class(type(module)) is not _own_class(kind):
                return f"the class of {path}" if path else "the class of the model"
        return None


class _NameSearch:
    """Follows the names in functions to values and to other functions.

    A name of a function is looked up among its globals and what it encloses, and among the
    attributes of all objects, classes and Python modules that are found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = frozenset({"forward"})
        before, named_modules = frozenset[str](), list(model.named_modules())
        self._packages = {_package(type(module).__module__) for _, module in named_modules}
        # What is found is followed later: objects may lead to others a thousand times over.
        self._found: deque[tuple[str, Any]] = deque()
        # A function that is found may name attributes of what was found before it.
        while before != self._names:
            before = self._names
            self.values: list[_OutsideValue] = []
            self.code: list[tuple[str, Read, Any]] = []
            self._seen: set[int] = set()
            self._known_globals: dict[int, set[str]] = {}
            for path, module in named_modules:
                self._look_in_module(path, module)
            while self._found:
                self._look_up(*self._found.popleft())

    def _look_in_module(self, path: str, module: nn.Module) -> None:
        self._look_in_class(type(module))
        attributes = vars(module)
        for name in self._named(attributes):
            where, value = f"{path}.{name}".lstrip("."), attributes[name]
            # The others are compared by the modules' owner.
            if isinstance(value, (*ARRAYS, *MAPPINGS)):
                self._look(where, partial(attributes.get, name, GONE))
            self._follow(where, value)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._follow("a hook", hook)

    def _look(self, where: str, read: Read) -> None:
        """Note what is in a place that a function reads, and follow it."""
        value = read()
        if isinstance(value, COMPARED):
            self.values.append(_OutsideValue(where, read, value, _comparable(value)))
        else:
            self.code.append((where, read, value))
        self._follow(where, value)

    def _look_among(self, where: str, items: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in filter(items.__contains__, names):
            self._look(f"{where}.{name}", partial(items.get, name, GONE))

    def _follow(self, where: str, value: Any) -> None:
        """Look up in `value` later what can be reached in it."""
        self._found.append((where, value))

    def _look_up(self, where: str, value: Any) -> None:
        """Look up in `value`, and in what it consists of, the names that can reach it."""
        if isinstance(value, type):
            self._look_in_class(value)
        # What modules of the model hold is compared by itself.
        if id(value) in self._seen or isinstance(value, (*PLAIN, *ARRAYS, Tensor, nn.Module, type)):
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._look_in_function(value)
        elif self._is_owner(value):
            self._look_in_object(where, value)
        if isinstance(value, ContextVar):
            self._look(f"{where}.get()", partial(value.get, GONE))
        for kind, parts in PARTS.items():
            if isinstance(value, kind):
                for part in parts:
                    self._look(f"{where}.{part}", partial(getattr, value, part))
        if isinstance(value, (*CONTAINERS, *MAPPINGS, tuple)) and len(value) <= MOST_ITEMS:
            for item in value.values() if isinstance(value, (dict, *MAPPINGS)) else value:
                # Tables of functions and classes have those of all models, not of this one.
                if not isinstance(item, (FunctionType, type)):
                    self._follow(where, item)

    def _look_in_function(self, function: FunctionType) -> None:
        if self._is_foreign(function.__module__):
            return
        code, where = function.__code__, function.__qualname__
        reads = _reads(code)
        self._names |= reads.names
        # Functions of one module share its globals.
        known = self._known_globals.setdefault(id(function.__globals__), set())
        names = reads.globals - known
        known |= names
        self._look_among(function.__module__, function.__globals__, names)
        self._look_among(where, vars(function), self._named(vars(function)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._look(f"{name} in {where}", partial(_content, cell))
        # Who calls a function without defaults gives all arguments, whatever it has later.
        for part in ("__defaults__", "__kwdefaults__"):
            read = partial(getattr, function, part)
            if isinstance(read(), tuple) and all(isinstance(each, PLAIN) for each in read()):
                self.code.append((f"{part} of {where}", read, read()))
            elif read():
                self._look(f"{part} of {where}", read)
        for name in reads.imports:
            self._follow(name, sys.modules.get(name))
        if reads.names & ENVIRONMENT:
            for name in _strings(code):
                self._look(f"os.environ[{name!r}]", partial(os.environ.get, name))

    def _look_in_object(self, where: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", {})
        self._look_among(where, attributes, self._named(attributes))
        if isinstance(value, ModuleType):
            return
        self._look_in_class(type(value))
        for base in type(value).__mro__:
            for name in self._named(vars(base)):
                if isinstance(vars(base)[name], MemberDescriptorType):  # a slot
                    self._look(f"{where}.{name}", partial(getattr, value, name, GONE))

    def _look_in_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen and not self._is_foreign(base.__module__):
                self._seen.add(id(base))
                names = {*self._named(vars(base)), *_operators(base)}
                self._look_among(base.__qualname__, vars(base), names)

    def _named(self, attributes: Iterable[str]) -> list[str]:
        """Return those of the attributes that a function names."""
        return [name for name in attributes if name in self._names]

    def _is_owner(self, value: Any) -> bool:
        """Return whether `value` is an object or a Python module of the user, with attributes."""
        if isinstance(value, ModuleType):
            return not self._is_foreign(value.__name__)
        module = type(value).__module__
        return module in NAMESPACES or not self._is_foreign(module)

    def _is_foreign(self, module: str | None) -> bool:
        package = _package(module)
        return _is_foreign(module) or (_is_installed(package) and package not in self._packages)


def _operators(kind: type) -> Iterator[str]:
    """Yield the methods of a class that code may call without naming them."""
    for name, method in vars(kind).items():
        is_special = name.startswith("__") and name.endswith("__") and name not in NOT_READING
        if is_special and isinstance(method, FunctionType):
            yield name


def _own_class(kind: type) -> type:
    """Return a class of modules; the one inside, if torch made a class around it."""
    own: Iterator[type] = (base for base in kind.__mro__ if not _is_foreign(base.__module__))
    # Modules of torch itself run as they are.
    return next(own, nn.Module)


def _is_foreign(module: str | None) -> bool:
    package = _package(module)
    return package in FOREIGN or package in sys.stdlib_module_names


def _package(module: str | None) -> str:
    return (module or "builtins").partition(".")[0]


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package is among those that were installed, and is not the user's code."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places if place)


class _Reads(NamedTuple):
    """What code reads by name, with the functions in it: all names, those of globals, and the
    Python modules that it imports when it runs.
    """

    names: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[str]


@cache
def _reads(code: CodeType) -> _Reads:
    found = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    loads = {name for operation, name in found if operation.startswith(("LOAD", "IMPORT_FROM"))}
    names = loads.intersection(code.co_names)
    imports = {name for operation, name in found if operation == "IMPORT_NAME"}
    of_globals = {name for operation, name in found if operation in GLOBAL_LOADS}
    texts = _strings(code) if names & BY_TEXT else []
    if "globals" in names:
        of_globals.update(texts)
    inner = [_reads(each) for each in code.co_consts if isinstance(each, CodeType)]
    return _Reads(
        frozenset(names.union(texts, *(each.names for each in inner))),
        frozenset(of_globals.union(*(each.globals for each in inner))),
        frozenset(imports.union(*(each.imports for each in inner))),
    )


def _strings(code: CodeType) -> list[str]:
    """Return the strings in `code` that may name a variable of the environment."""
    return [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return GONE
