"""What modules keep in Python attributes is seen when it changes, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.graph.attributes import ModuleAttributes, attributes_restored


def model() -> Any:
    made: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.number, made.items, made.table, made.names = 1, [1], {"a": 1}, {"a"}
    return made


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
def test_each_change_is_seen_and_put_back(name: str) -> None:
    change, attribute = CHANGES[name]
    made = model()
    before = ModuleAttributes.of(made)
    kept = (
        dict(vars(made)),
        list(made.items),
        dict(made.table),
        set(made.names),
        list(made._modules),
    )
    change(made)
    assert before.changed(ModuleAttributes.of(made)) == [(made, attribute)]
    before.restore()
    assert before.changed(ModuleAttributes.of(made)) == []
    assert (
        dict(vars(made)),
        list(made.items),
        dict(made.table),
        set(made.names),
        list(made._modules),
    ) == kept


def test_equal_plain_values_are_no_change() -> None:
    made = model()
    before = ModuleAttributes.of(made)
    made.number, made.items, made.table, made.names = 1, [1], {"a": 1}, {"a"}
    assert before.changed(ModuleAttributes.of(made)) == []


def test_another_tensor_is_a_change_even_if_equal() -> None:
    made = model()
    made.kept = torch.ones(2)
    before = ModuleAttributes.of(made)
    made.kept = torch.ones(2)
    assert before.changed(ModuleAttributes.of(made)) == [(made, "kept")]


def test_parameters_and_buffers_have_watchers_of_their_own() -> None:
    made = model()
    before = ModuleAttributes.of(made)
    own = made[1].running_mean
    made[1].running_mean = torch.ones(2)
    assert before.changed(ModuleAttributes.of(made)) == []
    before.restore()
    assert made[1].running_mean is own


def test_the_list_itself_is_put_back_with_its_items() -> None:
    made = model()
    held = made.items
    with attributes_restored(made):
        made.items.append(2)
        made.items = "another"
    assert made.items is held
    assert held == [1]


def test_an_error_in_the_block_puts_back_too() -> None:
    made = model()
    with pytest.raises(ZeroDivisionError), attributes_restored(made):
        made.number = 1 / 0 if made.table.update(a=3) is None else 2
    assert made.table == {"a": 1}


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
    made = nn.Identity()
    assert ModuleAttributes.of(made).described(made, "kept") == "nothing"
    vars(made)["kept"] = value
    assert ModuleAttributes.of(made).described(made, "kept") == text
