"""Which attributes of an object, a class or a Python module code may find there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from types import FunctionType, MemberDescriptorType
from typing import Any

from torch import Tensor

from pipecompile.frontend.compared_value import MAPPINGS, MOST_ITEMS, NUMBERS
from pipecompile.graph.attributes import CONTAINERS, PLAIN, plain_container

__all__ = [
    "aliased_names",
    "attributes_of",
    "data_names",
    "function_names",
    "may_be_hidden",
    "names_there",
    "new_name",
    "newest_name",
    "own_names",
    "slots_in",
]

MOST_DEEP = 4
"""How deep containers in a value may lie, since one may hold itself."""
KEPT_BY_PYTHON = frozenset({"__annotations__", "__slotnames__", "__abstractmethods__"})


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, which may be none, or not let anybody see them."""
    attributes: Any = None
    with suppress(Exception):
        attributes = vars(value)
    return attributes if isinstance(attributes, Mapping) else {}


def own_names(attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of all attributes but those that Python keeps for itself."""
    # A copy, since attributes of a Python module may come into being in another thread.
    return [name for name in tuple(attributes) if not (name[:2] == "__" == name[-2:])]


def data_names(attributes: Mapping[str, Any]) -> list[str]:
    """Return those names whose attributes are values or slots."""
    return [name for name in own_names(attributes) if _is_data(attributes[name])]


def function_names(attributes: Mapping[str, Any]) -> list[str]:
    """Return those names whose attributes are functions."""
    return [name for name in own_names(attributes) if isinstance(attributes[name], FunctionType)]


def slots_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a class that are slots of its objects."""
    slots = (pair for pair in attributes.items() if isinstance(pair[1], MemberDescriptorType))
    return dict(slots)


def aliased_names(kind: type, names: Collection[str]) -> set[str]:
    """Return the names that a class looks up where code reads `names` of its objects: configs of
    transformers have aliases for some of their attributes.
    """
    aliases = getattr(kind, "attribute_map", None)
    if not isinstance(aliases, dict):
        return set()
    return {own for alias, own in aliases.items() if alias in names and isinstance(own, str)}


def names_there(attributes: Mapping[str, Any], kind: type) -> frozenset[str]:
    """Return the names that are no news on an object: those of its attributes and of its class, and
    those that Python may set at any time.
    """
    return KEPT_BY_PYTHON.union(attributes, *map(vars, kind.__mro__))


def may_be_hidden(kind: type, name: str) -> bool:
    """Return whether an object of a class may have another value of this name in its place."""
    value = vars(kind)[name]
    # Not those of properties, which come first; cached ones put values into objects.
    return isinstance(value, FunctionType) or not hasattr(type(value), "__get__")


def _is_data(value: Any, depth: int = 0) -> bool:
    """Return whether a value consists of numbers, strings and tensors alone."""
    if isinstance(value, (*CONTAINERS, *MAPPINGS, tuple)) and depth < MOST_DEEP:
        if len(value) > MOST_ITEMS:
            return True
        items = plain_container(value)
        inner = items.values() if isinstance(items, (dict, *MAPPINGS)) else items
        return all(_is_data(item, depth + 1) for item in inner)
    return isinstance(value, (*PLAIN, *NUMBERS, Tensor, MemberDescriptorType))


def newest_name(where: str, items: Mapping[str, Any], known: frozenset[str]) -> str:
    """Return the name of the first of the `items` of a place that is not among those known."""
    return f"{where}.{next(name for name in items if name not in known)}"


def new_name(where: str, items: Mapping[str, Any], absent: frozenset[str]) -> str:
    """Return the name of the first of the `absent` items of a place that is there now."""
    return f"{where}.{next(name for name in sorted(absent) if name in items)}"
