"""A search that begins with the names of an earlier one finds the same, in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.frontend.name_search import NameSearch
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments


class Table:
    def __init__(self) -> None:
        self.first, self.last, self.unread = [1.0], {"gain": 2.0}, 3.0


TABLE = Table()


def last(table: Table) -> float:
    return table.last["gain"]


class Scaled(nn.Module):
    """What it reads is found by the names in functions that are found one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * last(TABLE)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each pass of a search."""
    counted: list[int] = []
    search = NameSearch._search

    def count(self: NameSearch, *arguments: Any) -> None:
        counted.append(len(counted))
        search(self, *arguments)

    monkeypatch.setattr(NameSearch, "_search", count)
    return counted


def places(search: NameSearch) -> list[str]:
    return sorted(each.where for each in search.found.values)


def test_a_search_with_the_names_of_an_earlier_one_is_one_pass(passes: list[int]) -> None:
    model = Scaled()
    first = NameSearch(model)
    assert any(place.endswith("TABLE.last") for place in places(first))
    assert not any("unread" in place for place in places(first))
    needed = len(passes)
    assert needed > 1
    second = NameSearch(model, names=first.found_names)
    assert len(passes) == needed + 1
    assert places(second) == places(first) and second.names == first.names


def test_a_search_with_such_names_finds_new_ones_too() -> None:
    model = Scaled()
    first = NameSearch(model)
    model.linear.register_forward_hook(lambda *_: TABLE.unread)
    second = NameSearch(model, names=first.found_names)
    assert places(second) == places(NameSearch(model))
    assert any("unread" in place for place in places(second))


def test_a_capture_searches_with_the_names_that_it_has_found(passes: list[int]) -> None:
    captured, _, _ = proven_capture(Scaled(), Arguments((torch.ones(4, 4),), {}))
    before = len(passes)
    captured.outside_values()
    assert len(passes) == before + 1
