"""Places that code reads, and a quick look at many of them at once.

A forward may read a thousand, and each step asks whether they have what they had:

    Item(vars(module), "gelu")        asked together with the other items of that mapping
    Attribute(function, "__code__")   asked together with that attribute of other objects
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any

from pipecompile.graph.attributes import getter_of
from pipecompile.graph.table_writes import AskedAfterWrites, table_of

__all__ = ["GONE", "Attribute", "Item", "NoItem", "Places", "Read", "variable"]

GONE = object()

Read = Callable[[], Any]
"""Returns what is in a place now, `GONE` if nothing is."""


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """The read of the item of a mapping that has this name."""

    items: Mapping[Any, Any]
    name: Any

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


def variable(name: str) -> Item:
    """Return the read of a variable of the environment."""
    # The table behind it, since it makes a new string each time that it is asked. A test may have
    # put a dict there.
    table = vars(os.environ).get("_data") if hasattr(os.environ, "encodekey") else None
    return Item(os.environ, name) if table is None else Item(table, os.environ.encodekey(name))


class Places:
    """The objects that are in many places, given as what reads each and what it has read."""

    def __init__(self, objects: Iterable[tuple[Read, Any]]) -> None:
        tables: dict[int, _KnownItems] = {}
        owners: dict[str, dict[int, tuple[Any, Any]]] = {}
        others: list[tuple[Read, Any]] = []
        for read, value in objects:
            table = table_of(read.items) if isinstance(read, (Item, NoItem)) else None
            if isinstance(read, (Item, NoItem)) and table is not None:
                known = tables.setdefault(id(table), _KnownItems(table))
                known.note(read, value)
            elif isinstance(read, Attribute) and value is not GONE:
                owners.setdefault(read.name, {})[id(read.owner)] = read.owner, value
            else:
                others.append((read, value))
        known_items = _ItemsOfTables(tables.values())
        self._in_tables = AskedAfterWrites(
            known_items.are_the_same, [each.table for each in tables.values()]
        )
        self._owners = [
            (attrgetter(name), [owner for owner, _ in each.values()])
            for name, each in owners.items()
        ]
        self._others = [read for read, _ in others]
        self._objects = [
            *(value for each in owners.values() for _, value in each.values()),
            *(value for _, value in others),
        ]

    def are_the_same(self) -> bool:
        """Return whether each place has the same object. If not, it may still have an equal one."""
        try:
            return self._in_tables.holds() and all(map(is_, self._current_objects(), self._objects))
        except (AttributeError, ValueError):  # something is gone
            return False

    def _current_objects(self) -> Iterator[Any]:
        # Without loops in Python over what is there: a step of a small model takes a millisecond.
        return chain(
            chain.from_iterable(map(getter, owners) for getter, owners in self._owners),
            map(call, self._others),
        )


class _KnownItems:
    """What is known of a table: its items that are `present`, and the names that are `absent`."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table = table
        self.present = dict[Any, Any]()
        self.absent = set[Any]()

    def note(self, read: Item | NoItem, value: Any) -> None:
        """Note what was read."""
        if isinstance(read, NoItem):
            self.absent |= read.names
        elif value is GONE:
            self.absent.add(read.name)
        else:
            self.present[read.name] = value


class _ItemsOfTables:
    """The items that are known of some tables, and those that these do not have."""

    def __init__(self, known: Iterable[_KnownItems]) -> None:
        filled = [each for each in known if each.present]
        self._tables = [each.table for each in filled]
        self._getters = [getter_of(each.present) for each in filled]
        self._items = list(self._current_items([each.present for each in filled]))
        self._are_absent = [
            partial(each.table.keys().isdisjoint, frozenset(each.absent))
            for each in known
            if each.absent
        ]

    def are_the_same(self) -> bool:
        try:
            return all(map(is_, self._current_items(self._tables), self._items)) and all(
                map(call, self._are_absent)
            )
        except KeyError:  # one is gone
            return False

    def _current_items(self, tables: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        return chain.from_iterable(map(call, self._getters, tables))
