"""What an attribute may be that the forward reads before it sets it.

The graph was made with what was there before the forward, and a second forward, which began with
what the first one left, has recorded the same graph. So the attribute may be either of these:

    if self.tau is None: self.tau = 1.0        tau: None or 1.0, and nothing else
    a = x / self.state["tau"]                  state: "tau" is what it was; "attention" is missing
    self.state["attention"] = a.detach()       or any tensor, since each forward makes another one
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecompile.frontend.compared_value import NUMBERS, comparable
from pipecompile.graph.attributes import ABSENT, ITSELF, PLAIN, deep_copy, is_same_value

__all__ = ["AssignedValue", "PlacedValue"]

SYMBOLIC: Mapping[type, type] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}


@dataclass(frozen=True)
class _Made:
    """Stands for a value that each forward makes anew: its class and its code are compared."""

    kind: type
    code: Any

    def is_like(self, value: Any) -> bool:
        return isinstance(value, self.kind) and getattr(value, "__code__", None) is self.code


@dataclass(frozen=True)
class AssignedValue:
    """What an attribute was `before` the forward that sets it, and what that `left` there.

    Containers are copied. `is_read_first` tells whether the forward reads it before it sets it.
    """

    before: Any
    left: Any
    is_read_first: bool

    @staticmethod
    def of(before: Any, left: Any, known: Collection[int], *, is_read_first: bool) -> AssignedValue:
        """Return the value of two copies; `known` has the ids of what was there `before`."""
        return AssignedValue(before, _without_made(left, known), is_read_first)

    def may_be(self, value: Any) -> bool:
        """Return whether the graph holds if the attribute is `value` now."""
        return _is_one_of(deep_copy(value), (self.before, self.left))


@dataclass(frozen=True)
class PlacedValue:
    """An assigned value, and the attribute `name` of a module that it is of; `where` is its path
    in the model.
    """

    where: str
    attributes: Mapping[str, Any]
    name: str
    value: AssignedValue

    @property
    def is_allowed(self) -> bool:
        """Whether the graph holds for what the attribute is now."""
        return self.value.may_be(self.attributes.get(self.name, ABSENT))

    @property
    def text(self) -> str:
        """What it is now and may be, for an attribute that is not allowed."""
        now, before, left = (
            self.attributes.get(self.name, ABSENT),
            self.value.before,
            self.value.left,
        )
        if all(isinstance(each, PLAIN) for each in (now, before, left)):
            return (
                f"{self.where} is {now!r}, but was {before!r} when the model was compiled, and its "
                f"forward left {left!r} there"
            )
        return (
            f"{self.where} is or holds something else than when the model was compiled, and than "
            "its forward left there"
        )


def _without_made(value: Any, known: Collection[int]) -> Any:
    """Return a copied value with `_Made` in the place of what is not `known` and no constant."""
    if isinstance(value, dict):
        return {key: _without_made(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_made(item, known) for item in value]
    is_constant = isinstance(value, (*PLAIN, *NUMBERS, set)) or value is ABSENT or value is ITSELF
    if is_constant or id(value) in known:
        return value
    kind = Tensor if isinstance(value, Tensor) else SYMBOLIC.get(type(value), type(value))
    return _Made(kind, getattr(value, "__code__", None))


def _is_one_of(value: Any, options: Sequence[Any]) -> bool:
    """Return whether a copied value is one of the options; items of containers may be those of
    different ones.
    """
    if isinstance(value, dict):
        tables = [each for each in options if isinstance(each, dict)]
        keys = {*value, *(key for table in tables for key in table)}
        return bool(tables) and all(
            _is_one_of(value.get(key, ABSENT), [table.get(key, ABSENT) for table in tables])
            for key in keys
        )
    if isinstance(value, list):
        rows = [each for each in options if isinstance(each, list) and len(each) == len(value)]
        columns = zip(value, *rows, strict=True)
        return bool(rows) and all(_is_one_of(item, others) for item, *others in columns)
    return any(
        each.is_like(value)
        if isinstance(each, _Made)
        else is_same_value(comparable(value), comparable(each))
        for each in options
    )
