"""What code reaches of classes and callables without naming it: operators, what makes objects, and
functions behind what stands for one.

    x + y                      `__add__` of a class, which no code names
    Scale()                    `__new__` and `__init__` of Scale
    partial(scale, 2.0)(x)     `func`, `args` and `keywords` of the partial

`NameSearch` looks at these too.
"""

from __future__ import annotations

from collections import UserList, defaultdict
from collections.abc import Iterator, Mapping
from configparser import RawConfigParser
from functools import cache, cached_property, partial, partialmethod, singledispatchmethod
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

__all__ = ["MAKING", "REGISTRY", "operators", "parts_of"]

MAKING = frozenset({"__new__", "__init__", "__post_init__"})
"""What runs if code makes an object of a class that it names."""
NOT_READING = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "set_name", "setattr", "delattr", "del"),
        *("repr", "str", "eq", "hash", "copy", "deepcopy", "reduce", "getstate", "setstate"),
    )
)
"""Special methods that a forward is not likely to call, unlike those of operators."""
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
}
"""Attributes of what leads to a function, which calls it with these, or to items."""
REGISTRY = "registry"
"""The attribute in which a function of functools.singledispatch has those that it calls."""


def operators(kind: type) -> Iterator[str]:
    """Yield the methods of a class that code may call without naming them."""
    for name, method in vars(kind).items():
        is_special = name.startswith("__") and name.endswith("__") and name not in NOT_READING
        if is_special and isinstance(method, FunctionType):
            yield name


def parts_of(value: Any) -> tuple[str, ...]:
    """Return the attributes by which an object leads to functions or to items."""
    return tuple(part for kind, parts in PARTS.items() if isinstance(value, kind) for part in parts)
