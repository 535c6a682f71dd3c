"""Changes of Python attributes of modules are noticed and restored."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.graph.attributes import (
    AttributeItems,
    ModuleAttributes,
    attributes_restored,
    settings_of,
)


def model() -> Any:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.number, module.items, module.table, module.names = 1, [1], {"a": 1}, {"a"}
    return module


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda m: setattr(m, "number", 2), "number"),
    "new": (lambda m: setattr(m, "extra", torch.ones(2)), "extra"),
    "gone": (lambda m: delattr(m, "number"), "number"),
    "list": (lambda m: m.items.append(2), "items"),
    "dict": (lambda m: m.table.update(a=2), "table"),
    "order": (lambda m: m.table.update(b=2), "table"),
    "set": (lambda m: m.names.add("b"), "names"),
    "type": (lambda m: setattr(m, "number", True), "number"),
    "equal tensor": (lambda m: setattr(m, "items", [torch.ones(1)]), "items"),
    "module": (lambda m: m.append(nn.ReLU()), "_modules"),
    "buffer": (lambda m: m.register_buffer("b", torch.ones(1)), "_buffers"),
    "mode": (lambda m: setattr(m, "training", False), "training"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed_and_restored(name: str) -> None:
    change, attribute = CHANGES[name]
    module = model()
    before = ModuleAttributes.of(module)
    snapshot = (
        dict(vars(module)),
        list(module.items),
        dict(module.table),
        set(module.names),
        list(module._modules),
    )
    change(module)
    assert before.changed(ModuleAttributes.of(module)) == [(module, attribute)]
    before.restore()
    assert before.changed(ModuleAttributes.of(module)) == []
    assert (
        dict(vars(module)),
        list(module.items),
        dict(module.table),
        set(module.names),
        list(module._modules),
    ) == snapshot


class Named(OrderedDict[str, Any]):
    """A table that needs a name to be made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Lazy(dict[str, Any]):
    """A table whose items are loaded when somebody asks for them."""

    def items(self) -> Any:
        raise AssertionError("all of it is loaded")

    values = __iter__ = items


class Window(deque[int]):
    """The last numbers, of which there must be some."""

    def __init__(self, first: int) -> None:
        super().__init__([first], maxlen=3)


OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "ordered": (lambda: Named("a"), lambda table: table.update(b=1)),
    "reordered": (lambda: Named("a"), lambda table: table.move_to_end("first")),
    "lazy": (lambda: Lazy(c=[1]), lambda table: table["c"].append(2)),
    "window": (lambda: Window(1), lambda numbers: numbers.append(2)),
    "counter": (lambda: Counter("ab"), lambda counts: counts.update("a")),
}


@pytest.mark.parametrize("name", OWN)
def test_containers_of_own_classes_are_compared_and_restored(name: str) -> None:
    make, change = OWN[name]
    module = model()
    module.own = make()
    if name == "reordered":
        module.own.update(first=1, second=2)
    before = ModuleAttributes.of(module)
    change(module.own)
    assert before.changed(ModuleAttributes.of(module)) == [(module, "own")]
    before.restore()
    assert before.changed(ModuleAttributes.of(module)) == []
    assert before.values[module]["own"] is module.own


def test_equal_plain_values_are_no_change() -> None:
    module = model()
    before = ModuleAttributes.of(module)
    module.number, module.items, module.table, module.names = 1, [1], {"a": 1}, {"a"}
    assert before.changed(ModuleAttributes.of(module)) == []


def test_another_tensor_is_a_change_even_if_equal() -> None:
    module = model()
    module.snapshot = torch.ones(2)
    before = ModuleAttributes.of(module)
    module.snapshot = torch.ones(2)
    assert before.changed(ModuleAttributes.of(module)) == [(module, "snapshot")]


def test_replaced_parameters_and_buffers_are_no_change() -> None:
    module = model()
    before = ModuleAttributes.of(module)
    own = module[1].running_mean
    module[1].running_mean = torch.ones(2)
    assert before.changed(ModuleAttributes.of(module)) == []
    before.restore()
    assert module[1].running_mean is own


def test_a_list_is_restored_with_its_items() -> None:
    module = model()
    held = module.items
    with attributes_restored(module):
        module.items.append(2)
        module.items = "another"
    assert module.items is held
    assert held == [1]


def test_attributes_are_restored_after_an_error() -> None:
    module = model()
    with pytest.raises(ZeroDivisionError), attributes_restored(module):
        module.number = 1 / 0 if module.table.update(a=3) is None else 2
    assert module.table == {"a": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ([torch.ones(2), None], "[a tensor (2,) torch.float32 False, None]"),
        ({"a": (1, "b")}, "{'a': [1, b]}"),
        (nn.ReLU(), "a ReLU"),
    ],
)
def test_values_as_text(value: object, text: str) -> None:
    module = nn.Identity()
    assert ModuleAttributes.of(module).described(module, "snapshot") == "nothing"
    vars(module)["snapshot"] = value
    assert ModuleAttributes.of(module).described(module, "snapshot") == text


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_one_of_items(case: str) -> None:
    change, _ = CHANGES[case]
    module = model()
    items = AttributeItems((part, ["training", *settings_of(part)]) for part in module.modules())
    assert items.are_the_same()
    change(module)
    assert not items.are_the_same()


def test_an_item_that_moves_to_the_next_container_has_changed() -> None:
    module: Any = nn.Module()
    module.earlier, module.later = [object()], []
    items = AttributeItems([(module, settings_of(module))])
    module.later.append(module.earlier.pop())
    assert not items.are_the_same()


def test_only_the_named_attributes_are_compared() -> None:
    module = model()
    items = AttributeItems([(module, ["number"])])
    module.names.add("b")
    assert items.are_the_same()
    module.number = 2
    assert not items.are_the_same()


@pytest.mark.parametrize("name", ["_forward_hooks", "_buffers"])
def test_a_table_in_the_place_of_an_empty_one_is_another(name: str) -> None:
    module = nn.Linear(1, 1)
    names = [(module, [name]), (nn.Linear(1, 1), [name])]
    items = AttributeItems(names)
    setattr(module, name, type(vars(module)[name])())
    # Equal for now, but what is added to it would not be seen by looking at the old one.
    assert not items.are_the_same()
    items = AttributeItems(names)
    assert items.are_the_same()
    vars(module)[name]["added"] = nn.Identity()
    assert not items.are_the_same()


def test_names_in_each_others_place_have_changed() -> None:
    module: Any = nn.Module()
    module.table = {"a": 1, "b": 1}
    items = AttributeItems([(module, ["table"])])
    module.table["a"] = module.table.pop("a")
    assert not items.are_the_same()


def test_other_attributes_as_a_whole_are_a_change() -> None:
    module: Any = nn.Identity()
    module.number = 1.0
    items = AttributeItems([(module, ["number"])])
    module.__dict__ = {**vars(module)}
    assert not items.are_the_same()
