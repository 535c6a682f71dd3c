"""Many places are looked at as one: any of them that has another object is noticed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import CellType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.frontend.places import GONE, Attribute, Item, NoItem, Places, Read


class Loaded(dict[str, Any]):
    """Makes what is asked for, as the lazy tables of libraries do."""

    def __missing__(self, name: str) -> str:
        self[name] = name
        return name


class Owner:
    value: Any = "of the class"


def looked_at(*reads: Read) -> Places:
    return Places([(read, read()) for read in reads])


def swap(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


CHANGES: dict[str, tuple[Callable[[Any], list[Read]], Callable[[Any], Any]]] = {
    "an item": (lambda o: [Item(o.table, "a")], lambda o: o.table.update(a=object())),
    "an item that is gone": (lambda o: [Item(o.table, "a")], lambda o: o.table.pop("a")),
    "an item that came": (lambda o: [Item(o.table, "c")], lambda o: o.table.update(c=1)),
    "an item of two": (
        lambda o: [Item(o.table, "a"), Item(o.table, "b")],
        lambda o: o.table.update(b=object()),
    ),
    "two items in each other's place": (
        lambda o: [Item(o.table, "a"), Item(o.table, "b")],
        lambda o: o.table.update(a=o.table["b"], b=o.table["a"]),
    ),
    "an equal item of another type": (
        lambda o: [Item(o.table, "one")],
        lambda o: o.table.update(one=True),
    ),
    "an item of a class": (
        lambda o: [Item(vars(o.kind), "value")],
        lambda o: swap(o.kind, "value", object()),
    ),
    "an item of a lazy table": (
        lambda o: [Item(o.lazy, "a")],
        lambda o: o.lazy.update(a=object()),
    ),
    "a name that came": (
        lambda o: [NoItem(o.table, frozenset({"c", "d"})), NoItem(o.table, frozenset({"e"}))],
        lambda o: o.table.update(e=1),
    ),
    "an attribute": (lambda o: [Attribute(o, "value")], lambda o: swap(o, "value", object())),
    "an attribute that is gone": (lambda o: [Attribute(o, "value")], lambda o: delattr(o, "value")),
    "an attribute that came": (lambda o: [Attribute(o, "new")], lambda o: swap(o, "new", None)),
    "the same attribute of another": (
        lambda o: [Attribute(o, "value"), Attribute(o.kind, "value")],
        lambda o: swap(o.kind, "value", object()),
    ),
    "what a function encloses": (
        lambda o: [Attribute(o.cell, "cell_contents")],
        lambda o: swap(o.cell, "cell_contents", object()),
    ),
    "what a function enclosed": (
        lambda o: [Attribute(o.cell, "cell_contents")],
        lambda o: delattr(o.cell, "cell_contents"),
    ),
    "what a call returns": (lambda o: [lambda: o.value], lambda o: swap(o, "value", object())),
}


def owner() -> Any:
    return SimpleNamespace(
        table={"a": object(), "b": object(), "one": 1},
        kind=type("Kind", (Owner,), {"value": object()}),
        lazy=Loaded(a=object()),
        cell=CellType(object()),
        value=object(),
    )


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_one_place_is_noticed(case: str) -> None:
    reads_of, change = CHANGES[case]
    of = owner()
    places = looked_at(*reads_of(of), Item(of.table, "a"), Attribute(of.kind, "__mro__"))
    assert places.are_the_same()
    change(of)
    assert not places.are_the_same()


def test_nothing_is_made_by_looking() -> None:
    table = Loaded()
    places = looked_at(Item(table, "absent"))
    assert places.are_the_same()
    assert not table


def test_what_nobody_reads_may_change() -> None:
    of = owner()
    places = looked_at(Item(of.table, "a"), NoItem(of.table, frozenset({"c"})))
    of.table["d"], of.value = 1, 2
    assert places.are_the_same()


def test_what_is_not_there_is_gone() -> None:
    assert Item({}, "a")() is Attribute(object(), "a")() is GONE
    assert Attribute(CellType(), "cell_contents")() is GONE


NAMES = st.sampled_from("abcdef")


@given(
    st.dictionaries(NAMES, st.integers(0, 3)),
    st.dictionaries(NAMES, st.integers(0, 3)),
    st.sets(NAMES),
    st.sampled_from([dict, OrderedDict]),
)
def test_places_are_the_same_where_each_read_is(
    before: dict[str, int], after: dict[str, int], names: set[str], kind: type[dict[str, int]]
) -> None:
    table = kind(before)
    absent = frozenset("abcdef") - before.keys()
    reads: list[Read] = [*(Item(table, name) for name in names), NoItem(table, absent)]
    objects = [read() for read in reads]
    places = Places(zip(reads, objects, strict=True))
    table.clear()
    table.update(after)
    expected = all(read() is value for read, value in zip(reads, objects, strict=True))
    assert places.are_the_same() == expected
