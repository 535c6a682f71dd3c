"""Places that code reads, and a quick look at many of them at once.

A forward may read a thousand, and each step asks whether they have what they had:

    Item(vars(module), "gelu")        asked together with the other items of that mapping
    Attribute(function, "__code__")   asked together with that attribute of other objects
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_
from types import MappingProxyType
from typing import Any

from pipecompile.graph.attributes import getter_of

__all__ = ["GONE", "Attribute", "Item", "NoItem", "Places", "Read"]

GONE = object()

Read = Callable[[], Any]
"""Returns what is in a place now, `GONE` if nothing is."""


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """The read of the item of a mapping that has this name."""

    items: Mapping[str, Any]
    name: str

    def __call__(self) -> Any:
        """Return the item, `GONE` if there is none."""
        # By the method of Python's own class, since one below it may make what it is asked for.
        if isinstance(self.items, dict):
            return dict.get(self.items, self.name, GONE)
        return self.items.get(self.name, GONE)


@dataclass(frozen=True, eq=False, slots=True)
class NoItem:
    """The read of whether a mapping has none of these names."""

    items: Mapping[str, Any]
    names: frozenset[str]

    def __call__(self) -> bool:
        """Return whether there is none of them."""
        return self.items.keys().isdisjoint(self.names)


@dataclass(frozen=True, eq=False, slots=True)
class Attribute:
    """The read of an attribute of an object; its name has no dots."""

    owner: Any
    name: str

    def __call__(self) -> Any:
        """Return the attribute, `GONE` if there is none."""
        with suppress(AttributeError, ValueError):  # a cell may be empty
            return getattr(self.owner, self.name)
        return GONE


class Places:
    """The objects that are in many places, given as what reads each and what it has read."""

    def __init__(self, objects: Iterable[tuple[Read, Any]]) -> None:
        tables: dict[int, _KnownItems] = {}
        owners: dict[str, dict[int, tuple[Any, Any]]] = {}
        others: list[tuple[Read, Any]] = []
        for read, value in objects:
            # A proxy is that of a class: both have their items without making them.
            if isinstance(read, (Item, NoItem)) and type(read.items) in (dict, MappingProxyType):
                if id(read.items) not in tables:
                    tables[id(read.items)] = _KnownItems(read.items)
                tables[id(read.items)].note(read, value)
            elif isinstance(read, Attribute) and value is not GONE:
                owners.setdefault(read.name, {})[id(read.owner)] = read.owner, value
            else:
                others.append((read, value))
        others += (each.absence for each in tables.values() if each.absent)
        filled = [each for each in tables.values() if each.present]
        self._tables = [each.items for each in filled]
        self._getters = [getter_of(each.present) for each in filled]
        self._owners = [
            (attrgetter(name), [owner for owner, _ in each.values()])
            for name, each in owners.items()
        ]
        self._others = [read for read, _ in others]
        self._objects = [
            *chain.from_iterable(map(call, self._getters, [each.present for each in filled])),
            *(value for each in owners.values() for _, value in each.values()),
            *(value for _, value in others),
        ]

    def are_the_same(self) -> bool:
        """Return whether each place has the same object. If not, it may still have an equal one."""
        try:
            return all(map(is_, self._current_objects(), self._objects))
        except (AttributeError, KeyError, ValueError):  # something is gone
            return False

    def _current_objects(self) -> Iterator[Any]:
        # Without loops in Python over what is there: a step of a small model takes a millisecond.
        return chain(
            chain.from_iterable(map(call, self._getters, self._tables)),
            chain.from_iterable(map(getter, owners) for getter, owners in self._owners),
            map(call, self._others),
        )


class _KnownItems:
    """What is known of a mapping: its items that are `present`, and the names that are `absent`."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items = items
        self.present = dict[str, Any]()
        self.absent = set[str]()

    def note(self, read: Item | NoItem, value: Any) -> None:
        """Note what was read."""
        if isinstance(read, NoItem):
            self.absent |= read.names
        elif value is GONE:
            self.absent.add(read.name)
        else:
            self.present[read.name] = value

    @property
    def absence(self) -> tuple[Read, Any]:
        """The read of all that is absent, and what it has read."""
        return partial(self.items.keys().isdisjoint, frozenset(self.absent)), True
