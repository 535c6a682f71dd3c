"""Caches of functions that a forward calls hold no fake tensors, and become no constants."""

from __future__ import annotations

from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor
from traps import CALL, WIDTH, Two, X
from zoo import called
from zoo.exact import exact

from pipecompile.frontend.capture import capture


def test_fake_tensor_left_in_an_lru_cache() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + positions(WIDTH)

    positions.cache_clear()
    exact(Trap(), X)
    assert type(positions(WIDTH)) is Tensor
    exact(Trap(), X)  # and one that is filled is not baked into the graph
    assert "arange" in called(capture(Trap(), CALL).graph)


@lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width).float()


@lru_cache(maxsize=1)
def only_one(width: int) -> Tensor:
    return torch.arange(width).float()


@cache
def several(width: int, start: float = 0.0) -> dict[str, tuple[Tensor, ...]]:
    return {"both": (torch.full((width,), start), torch.ones(width))}


class Cached(Two):
    """Its tensors come from caches of all kinds."""

    @lru_cache  # noqa: B019
    def scale(self, width: int) -> Tensor:
        return torch.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = several(WIDTH, start=2.0)["both"]
        return self.first(x) * only_one(WIDTH) + left * right + self.scale(WIDTH)


@pytest.mark.parametrize("filled", [False, True])
def test_tensors_in_caches_of_all_kinds(filled: bool) -> None:
    """No tensor in a cache is left fake, and none becomes a constant of the graph."""
    model, caches = Cached(), (only_one, several, Cached.scale)
    for each in caches:
        each.cache_clear()
    if filled:
        model(X)
    graph = capture(model, CALL).graph
    assert [each.cache_info().currsize for each in caches] == [0, 0, 0]
    assert {"arange", "full", "ones", "zeros"} <= set(called(graph))
    exact(model, X)
