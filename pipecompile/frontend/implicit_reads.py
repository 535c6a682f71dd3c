"""What code reaches without naming it: operators of classes, constructors, and functions behind
objects that stand for one.

    x + y                      `__add__` of a class, which no code names
    Scale()                    `__new__` and `__init__` of Scale
    partial(scale, 2.0)(x)     `func`, `args` and `keywords` of the partial

`NameSearch` looks at these too.
"""

from __future__ import annotations

from collections import UserList, defaultdict
from collections.abc import Collection, Iterator, Mapping
from configparser import RawConfigParser
from contextlib import nullcontext
from functools import cache, cached_property, partial, partialmethod, singledispatchmethod
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy

from pipecompile.frontend.code_names import FORMATTING
from pipecompile.frontend.packages import is_installed, package_of
from pipecompile.frontend.source import is_user_file

__all__ = ["MAKING", "REGISTRY", "operators", "parts_of"]

MAKING = frozenset({"__new__", "__init__", "__post_init__"})
"""What runs if code makes an object of a class that it names."""
NOT_READING = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "set_name", "setattr", "delattr", "del"),
        *("deepcopy", "reduce", "getstate", "setstate"),
    )
)
"""Special methods that a forward is not likely to call, unlike those of operators."""
OF_TEXT = frozenset({"__str__", "__repr__", "__format__"})
OF_ALL_FIELDS = OF_TEXT | {"__eq__", "__ne__", "__hash__", "__copy__"}
"""What tools call too, and what reads all that an object has where a dataclass or a package made
it: the steps of training that a config counts, for example. Of the user's classes it counts where
the user has written it.
"""
MAKING_TEXT = frozenset({"str", "repr", "format", FORMATTING})
"""Names in code that makes text of objects."""
LOOKUPS = frozenset({"_missing_"})
"""What a class of Enum calls for a value that it does not have."""
METHODS = (FunctionType, classmethod, staticmethod)
PARTS: Mapping[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    singledispatchmethod: ("dispatcher",),
    cached_property: ("func",),
    type(cache(len)): ("__wrapped__",),
    MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
    partialmethod: ("func", "args", "keywords"),
    UserList: ("data",),
    WeakKeyDictionary: ("data",),
    WeakValueDictionary: ("data",),
    WeakSet: ("data",),
    defaultdict: ("default_factory",),
    RawConfigParser: ("_sections", "_defaults"),
    nullcontext: ("enter_result",),
    numpy.poly1d: ("coeffs",),
    numpy.vectorize: ("pyfunc",),
}
"""Attributes of what leads to a function, which calls it with these, or to items."""
REGISTRY = "registry"
"""The attribute in which a function of functools.singledispatch has those that it calls."""


def operators(kind: type, names: Collection[str]) -> Iterator[str]:
    """Yield the methods of a class that code, which has these names, may call without naming
    them.
    """
    is_own = not is_installed(package_of(kind.__module__))
    for name, method in vars(kind).items():
        is_special = name.startswith("__") and name.endswith("__") and name not in NOT_READING
        if not (is_special or name in LOOKUPS):
            continue
        if isinstance(method, (classmethod, staticmethod)):
            is_called = is_own
        elif name in OF_ALL_FIELDS:
            is_called = is_own and _is_written(method)
        else:
            is_called = True
        makes_text = name not in OF_TEXT or not MAKING_TEXT.isdisjoint(names)
        if is_called and makes_text and isinstance(method, METHODS):
            yield name


def _is_written(method: Any) -> bool:
    """Return whether a method is code of the user's, and not made by a dataclass."""
    return isinstance(method, FunctionType) and is_user_file(method.__code__.co_filename)


def parts_of(value: Any) -> tuple[str, ...]:
    """Return the attributes by which an object leads to functions or to items."""
    return tuple(part for kind, parts in PARTS.items() if isinstance(value, kind) for part in parts)
