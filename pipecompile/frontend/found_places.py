"""What a search for names has found: places that code may read, with what is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ProxyTypes

from torch import Tensor, nn

from pipecompile.frontend.code_names import OF_TENSORS
from pipecompile.frontend.compared_value import COMPARED, MOST_ITEMS, ComparedValue, comparable
from pipecompile.frontend.found_attributes import attributes_of, function_names, new_name
from pipecompile.frontend.packages import is_installed, package_of
from pipecompile.frontend.places import Item, NoItem, Read
from pipecompile.frontend.replaceable_code import CodeRead

__all__ = ["FoundPlaces"]


class FoundPlaces:
    """The places that were found, and the objects of them that are yet to be followed.

    `values` are compared by what they hold, `code` by which object it is. Of the `modules`, none
    of which the model registers, the `tensors` and the `iterators` it is known where they are.
    """

    def __init__(self) -> None:
        self.values: list[ComparedValue] = []
        self.code: list[CodeRead] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.iterators: list[tuple[str, Iterator[Any]]] = []
        # What is found is followed later: objects may lead to others a thousand times over.
        self.to_follow: deque[tuple[str, Any]] = deque()

    def look(self, where: str, read: Read, *, is_shared: bool = False) -> None:
        """Note what is at a place that a function reads, and follow it.

        A table that `is_shared` by all models of a package may get entries for others.
        """
        value = read()
        if is_shared and isinstance(value, dict) and len(value) <= MOST_ITEMS:
            self.code.append((where, read, value))
            for key, item in value.items():
                self.code.append((f"{where}[{key!r}]", Item(value, key), item))
        elif type(value) not in ProxyTypes and isinstance(value, COMPARED):
            self.values.append(ComparedValue(where, read, value, comparable(value)))
        else:
            self.code.append((where, read, value))
        self.follow(where, value)

    def look_among(
        self, where: str, items: Mapping[str, Any], names: Iterable[str], module: Any = None
    ) -> None:
        """Look at the items called `names`, which are those of a Python module if one is given."""
        is_shared = module is not None and is_installed(package_of(module))
        for name in names:
            self.look(f"{where}.{name}", Item(items, name), is_shared=is_shared)

    def note_absent(self, where: str, items: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note that none of the `names` that code would find among `items` is there yet."""
        # One look for all of them: they are many.
        if absent := frozenset(names) - items.keys():
            read = NoItem(items, absent)
            self.code.append((partial(new_name, where, items, absent), read, True))

    def note_absent_of_tensors(self, names: Iterable[str]) -> None:
        """Note that tensors have no attributes of these `names`, which code would find there."""
        absent = frozenset(names) - OF_TENSORS
        found = [(where, attributes_of(tensor)) for where, tensor in self.tensors]
        for where, attributes in found:
            if attributes:
                self.note_absent(where, attributes, absent)
        # Most have no attributes at all: one look for all of them.
        empty = [(where, attributes) for where, attributes in found if not attributes]
        tables = [attributes for _, attributes in empty]

        def place() -> str:
            where, attributes = next(each for each in empty if not absent.isdisjoint(each[1]))
            return new_name(where, attributes, absent)

        def read() -> bool:
            return not any(tables) or all(map(absent.isdisjoint, tables))

        self.code.append((place, read, True))

    def follow(self, where: str, value: Any) -> None:
        """Look up in `value` later what can be reached in it."""
        self.to_follow.append((where, value))

    def note_functions(self, where: str, attributes: Mapping[str, Any]) -> None:
        """Note functions that are called by names that code computes, without following them."""
        for name in function_names(attributes):
            self.code.append((f"{where}.{name}", Item(attributes, name), attributes[name]))
