"""Objects of the user's classes that layers hold are after a compile as they were, whether it is
accepted or refused; and none of them holds a tensor without values meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import mean_square
from torch import Tensor, nn

from pipecompile import CaptureError, pipecompile

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Memo:
    """What a forward sets, and a cache of its own."""

    calls = 0
    last: Tensor | None = None

    def ones(self) -> Tensor:
        """The ones of shape (WIDTH), made by the first who asks."""
        if not hasattr(self, "made"):
            self.made = torch.ones(WIDTH)
        return self.made


class Slotted:
    """The same in a slot."""

    __slots__ = ("last",)


def counts(memo: Any, value: Tensor) -> Tensor:
    memo.calls += 1
    return value


def keeps(memo: Any, value: Tensor) -> Tensor:
    memo.last = value
    return value


def caches(memo: Any, value: Tensor) -> Tensor:
    return value * memo.ones()


class Layer(nn.Linear):
    """A linear layer that uses an object, and is one node if it asks for data."""

    def __init__(self, held: Any, use: Callable[..., Tensor], asks: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held, self.use, self.asks = held, use, asks

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        value = super().forward(value)
        if self.asks and value.sum() > 1e9:
            value = value * 2
        held = self.held
        while isinstance(held, (list, dict)):
            held = held[0]
        return self.use(held, value)


def compiled(layer: Layer) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    return pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")


BOTH = pytest.mark.parametrize("asks", [False, True], ids=["in the graph", "one node"])


@BOTH
@pytest.mark.parametrize("held", [lambda memo: memo, lambda memo: {0: [memo]}])
def test_a_refused_compile_leaves_an_object_as_it_was(
    held: Callable[[Any], Any], asks: bool
) -> None:
    memo = Memo()
    with pytest.raises(CaptureError, match="the forward changes it"):
        compiled(Layer(held(memo), counts, asks))
    assert vars(memo) == {}


@BOTH
@pytest.mark.parametrize("make", [Memo, Slotted, SimpleNamespace])
def test_so_does_one_that_is_accepted(make: Callable[[], Any], asks: bool) -> None:
    memo = make()
    pipe = compiled(Layer([memo], keeps, asks))
    assert getattr(memo, "last", None) is None
    pipe.step(X, X)


def test_a_cache_in_an_object_is_to_be_filled_before() -> None:
    memo = Memo()
    layer = Layer(memo, caches, asks=False)
    with pytest.raises(CaptureError, match="run the model once before"):
        compiled(layer)
    assert vars(memo) == {}
    layer(X)
    compiled(layer).step(X, X)


def test_one_of_a_layer_that_is_one_node_is_filled_by_the_first_step() -> None:
    memo = Memo()
    pipe = compiled(Layer(memo, caches, asks=True))
    assert vars(memo) == {}
    pipe.step(X, X)
    assert torch.equal(memo.made, torch.ones(WIDTH))


def refused_forwards() -> Iterator[tuple[str, Callable[[Tensor], Tensor], Callable[[], object]]]:
    """Forwards that change something each time, and what is there now."""
    numbers, table, listed = np.zeros(2), {"calls": 0}, list[int]()
    count, mean = 0, torch.zeros(WIDTH)

    def in_array(value: Tensor) -> Tensor:
        numbers[:] += 1
        return value * float(numbers[0])

    def in_table(value: Tensor) -> Tensor:
        table["calls"] += 1
        return value * table["calls"]

    def in_cell(value: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return value * count

    def in_mean(value: Tensor) -> Tensor:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * value.detach().mean(0)
        return value - mean

    def in_class(value: Tensor) -> Tensor:
        Memo.calls += 1
        return value * Memo.calls

    def in_list(calls: list[int], value: Tensor) -> Tensor:
        calls.append(1)
        return value * len(calls)

    counted = nn.Parameter(torch.ones(WIDTH))
    counted.uses = 0  # type: ignore[attr-defined]
    calls: ContextVar[int] = ContextVar("calls", default=0)

    def on_parameter(value: Tensor) -> Tensor:
        counted.uses += 1  # type: ignore[attr-defined]
        return value * counted.uses  # type: ignore[attr-defined]

    def in_context(value: Tensor) -> Tensor:
        calls.set(calls.get() + 1)
        return value * calls.get()

    yield "an attribute of a parameter", on_parameter, lambda: counted.uses  # type: ignore[attr-defined]
    yield "a context variable", in_context, calls.get
    yield "an array", in_array, numbers.tolist
    yield "a dict that it encloses", in_table, lambda: dict(table)
    yield "a number that it encloses", in_cell, lambda: count
    yield "a tensor that it encloses", in_mean, lambda: (type(mean), mean.tolist())
    yield "an attribute of a class", in_class, lambda: Memo.calls
    yield "a list in a partial", partial(in_list, listed), lambda: list(listed)


REFUSED = {name: rest for name, *rest in refused_forwards()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_compile_puts_back_what_code_holds(name: str) -> None:
    forward, now = REFUSED[name]
    before = now()
    with pytest.raises(CaptureError):
        compiled(Layer(None, lambda _, value: forward(value), asks=False))
    assert now() == before
