"""Which attributes of modules a forward has read, and which it may have read."""

from __future__ import annotations

import copy
import functools
import operator
from dataclasses import asdict, astuple, dataclass
from enum import Enum
from typing import Any

import pytest
from torch import nn

from pipecompile.frontend.attribute_reads import ALL, AttributeReads


class Part(nn.Module):
    """Reads the attribute that each test asks for."""

    kind = "class"

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.items, self.inner = 2.0, [1], nn.Linear(1, 1)

    @property
    def doubled(self) -> float:
        """Twice the scale."""
        return 2 * self.scale

    @functools.cached_property
    def kept(self) -> float:
        """The scale when this was read first."""
        return self.scale


class Looking(Part):
    """Looks its attributes up itself."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def reads(read: Any, module: Any) -> set[tuple[str, str]]:
    noted = AttributeReads()
    with noted.noted(module):
        read(module)
    return set(noted.of(module))


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda m: m.scale, {("", "scale")}),
        (lambda m: getattr(m, f"sc{'a'}le"), {("", "scale")}),
        (lambda m: m.kind, {("", "kind")}),
        (lambda m: hasattr(m, "absent"), {("", "absent")}),
        (lambda m: m.doubled, {("", "doubled"), ("", "scale")}),
        (lambda m: m.kept, {("", "kept"), ("", "scale")}),
        (lambda m: m.inner.in_features, {("", "inner"), ("inner", "in_features")}),
        (lambda m: setattr(m, "scale", 1.0), set()),
        (lambda m: m.register_buffer("added", None), {("", "register_buffer")}),
    ],
)
def test_attributes_that_are_read_by_name(read: Any, names: set[tuple[str, str]]) -> None:
    found = reads(read, Part())
    assert names <= found
    assert not found & {("", "items"), ("", ALL)}
    if not names:
        assert ("", "scale") not in found


@dataclass
class Config:
    """Has an item for each field."""

    scale_0: float = 1.0
    scale_1: float = 2.0

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class OwnLookup(Config):
    """Looks its attributes up itself."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Slotted:
    """Has no dict."""

    __slots__ = ("scale_1",)

    def __init__(self) -> None:
        self.scale_1 = 2.0


class Choice(Enum):
    """Has values only."""

    scale_1 = 2.0


@pytest.mark.parametrize("config", [Config(), OwnLookup(), Slotted(), Choice.scale_1])
def test_attributes_of_objects_that_are_read_by_computed_names(config: Any) -> None:
    module, before = nn.Sequential(Part()), dict(vars(type(config)))
    module[0].config = config
    found = reads(lambda m: getattr(m[0].config, f"scale_{1}"), module)
    assert ("0.config", "scale_1") in found
    assert not found & {("0.config", "scale_0"), ("0.config", ALL)}
    assert dict(vars(type(config))) == before


@pytest.mark.parametrize("read", [lambda c: vars(c)[f"scale_{1}"], copy.copy])
def test_all_attributes_of_an_object_may_have_been_read(read: Any) -> None:
    module = Part()
    module.config = Config()
    assert ("config", ALL) in reads(lambda m: read(m.config), module)


@pytest.mark.parametrize(
    "read", [asdict, astuple, lambda c: c[f"scale_{1}"], operator.attrgetter(f"scale_{1}")]
)
def test_fields_of_a_config_are_read_in_many_ways(read: Any) -> None:
    module = Part()
    module.config = Config()
    assert ("config", "scale_1") in reads(lambda m: read(m.config), module)


@pytest.mark.parametrize(
    "read", [vars, dir, copy.copy, copy.deepcopy, lambda m: m.__dict__["scale"]]
)
def test_all_attributes_may_have_been_read(read: Any) -> None:
    assert ("", ALL) in reads(read, Part())


def test_a_class_that_looks_up_attributes_itself_may_have_read_all() -> None:
    assert reads(lambda m: None, nn.Sequential(Looking())) == {("0", ALL)}


def test_nothing_is_noted_behind_the_block() -> None:
    module, noted = Part(), AttributeReads()
    with noted.noted(module):
        pass
    assert module.scale and not noted.of(module)
    assert "__getattribute__" not in vars(nn.Module)
