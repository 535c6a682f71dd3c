"""Which attributes of modules a forward has read, and which it may have read."""

from __future__ import annotations

import copy
import functools
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
    with noted.noted():
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


@pytest.mark.parametrize(
    "read", [vars, dir, copy.copy, copy.deepcopy, lambda m: m.__dict__["scale"]]
)
def test_all_attributes_may_have_been_read(read: Any) -> None:
    assert ("", ALL) in reads(read, Part())


def test_a_class_that_looks_up_attributes_itself_may_have_read_all() -> None:
    assert reads(lambda m: None, nn.Sequential(Looking())) == {("0", ALL)}


def test_nothing_is_noted_behind_the_block() -> None:
    module, noted = Part(), AttributeReads()
    with noted.noted():
        pass
    assert module.scale and not noted.of(module)
    assert "__getattribute__" not in vars(nn.Module)
