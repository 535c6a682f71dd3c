"""A question about dictionaries is asked again after each kind of write to one, and only then."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipecompile.graph.table_writes import HAS_VERSIONS, AskedAfterWrites, table_of


class Owner:
    value: Any = "of the class"


def set_often(owner: Any) -> None:
    # Python makes code that runs often into faster code, with its own way to set an attribute.
    for number in range(2000):
        owner.value = number


WRITES_TO_TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another item": lambda table: table.update(a=object()),
    "a new item": lambda table: table.setdefault("c", object()),
    "an item less": lambda table: table.pop("a"),
    "the last item less": lambda table: table.popitem(),
    "no item": lambda table: table.clear(),
    "by an operator": lambda table: table.__ior__({"a": 2}),
    "in another order": lambda table: table.update(a=table.pop("a")),
}
FILLINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "by one item": lambda table: table.__setitem__("a", 1),
    "by those of another": lambda table: table.update({"a": 1, "b": 2}),
    "by pairs": lambda table: table.update([("a", 1)]),
    "by keywords": lambda table: table.update(a=1),
    "by an operator": lambda table: table.__ior__({"a": 1}),
    "by a default": lambda table: table.setdefault("a", 1),
}
WRITES_TO_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "set": lambda owner: setattr(owner, "value", object()),
    "set past the class": lambda owner: object.__setattr__(owner, "value", object()),
    "set often": set_often,
    "set first": lambda owner: setattr(owner, "other", 1),
    "deleted": lambda owner: delattr(owner, "value"),
    "by the table": lambda owner: vars(owner).update(value=object()),
}


class Question:
    """Counts how often it is asked."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.answer


def is_asked_after(write: Callable[[Any], Any], owner: Any, table: dict[str, Any]) -> bool:
    """Return whether the question is asked after a write to one of several tables."""
    question = Question(answer=False)
    asked = AskedAfterWrites(question, [{"a": 1}, table, {}])
    if HAS_VERSIONS:
        assert asked.holds(), "nothing was written"
    write(owner)
    return not asked.holds() and question.asked > 0


@pytest.mark.parametrize("case", WRITES_TO_TABLES)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_write_to_a_table_is_noticed(case: str, kind: type[dict[str, Any]]) -> None:
    table = kind(a=object(), b=object())
    assert is_asked_after(WRITES_TO_TABLES[case], table, table)


@pytest.mark.parametrize("case", FILLINGS)
@pytest.mark.parametrize("table_of_owner", [lambda owner: {}, vars], ids=["a dict", "attributes"])
def test_that_an_empty_table_is_filled_is_noticed(
    case: str, table_of_owner: Callable[[Owner], dict[str, Any]]
) -> None:
    table = table_of_owner(Owner())
    assert is_asked_after(FILLINGS[case], table, table)
    # Also where it was emptied, and that was seen.
    table = {"a": 1}
    question = Question()
    asked = AskedAfterWrites(question, [table])
    table.clear()
    assert asked.holds()
    count = question.asked
    FILLINGS[case](table)
    assert asked.holds()
    assert question.asked > count


@pytest.mark.parametrize("case", WRITES_TO_OBJECTS)
@pytest.mark.parametrize("kind", [Owner, nn.Identity])
def test_a_write_to_the_attributes_of_an_object_is_noticed(case: str, kind: type) -> None:
    owner = kind()
    owner.value = object()
    assert is_asked_after(WRITES_TO_OBJECTS[case], owner, vars(owner))


def test_a_write_to_the_attributes_of_a_class_is_noticed() -> None:
    kind = type("Kind", (Owner,), {"value": object()})
    table = table_of(vars(kind))
    assert table is not None
    assert is_asked_after(lambda kind: setattr(kind, "value", object()), kind, table)


def test_a_table_that_was_written_before_is_no_write_later() -> None:
    old, new = {"a": 1}, {"b": 1}
    question = Question()
    asked = AskedAfterWrites(question, [old, new])
    new["b"] = 2
    assert asked.holds()
    count = question.asked
    assert asked.holds()
    assert question.asked == (count if HAS_VERSIONS else count + 1)
    old["a"] = 2
    assert asked.holds()
    assert question.asked > count


def test_only_plain_dictionaries_are_tables() -> None:
    plain = {"a": 1}
    others: list[Mapping[str, Any]] = [OrderedDict(a=1), UserDict(a=1)]
    assert table_of(plain) is table_of(MappingProxyType(plain)) is plain
    assert [table_of(each) for each in others] == [None, None]
    assert [table_of(MappingProxyType(each)) for each in others] == [None, None]


NAMES = st.sampled_from("abc")


@given(
    st.lists(st.dictionaries(NAMES, st.integers(0, 2)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), NAMES, st.integers(0, 2) | st.none())),
)
def test_no_write_means_that_all_is_as_it_was(
    tables: list[dict[str, int]], writes: list[tuple[int, str, int | None]]
) -> None:
    question = Question(answer=False)
    asked = AskedAfterWrites(question, tables)
    before = list(map(list, map(dict.items, tables)))
    for index, name, value in writes:
        table = tables[index % len(tables)]
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
        if list(map(list, map(dict.items, tables))) != before:
            assert not asked.holds()
