"""A loss that is a function or an object is as it was after a compile, which calls it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import pipecompile
from pipecompile.frontend.callable_state import callable_restored

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor, Any], Tensor]
Told = Callable[[], object]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Counting:
    """Counts its calls, and lists what it gave."""

    def __init__(self) -> None:
        self.calls, self.given, self.mean = 0, deque[float](), torch.ones(())

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        loss: Tensor = mean_square(output, target)
        self.calls += 1
        self.given.append(float(loss.detach()))
        self.mean.mul_(0.9).add_(loss.detach() * 0.1)
        return loss / self.mean

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return self(output, target)

    def told(self) -> object:
        return self.calls, list(self.given), float(self.mean)


def of_object() -> tuple[Loss, Told]:
    loss = Counting()
    return loss, loss.told


def of_method() -> tuple[Loss, Told]:
    owner = Counting()
    return owner.loss, owner.told


def of_partial() -> tuple[Loss, Told]:
    owner = Counting()
    return partial(lambda state, output, target: state(output, target), owner), owner.told


def of_closure() -> tuple[Loss, Told]:
    calls, seen = 0, dict[int, float]()

    def loss(output: Tensor, target: Any) -> Tensor:
        nonlocal calls
        calls += 1
        seen[calls] = float(output.detach().sum())
        return mean_square(output, target)

    return loss, lambda: (calls, dict(seen))


def of_function_attribute() -> tuple[Loss, Told]:
    def loss(output: Tensor, target: Any) -> Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return mean_square(output, target)

    loss.calls = 0  # type: ignore[attr-defined]
    return loss, lambda: loss.calls  # type: ignore[attr-defined]


def of_default() -> tuple[Loss, Told]:
    def loss(output: Tensor, target: Any, seen: list[float] = []) -> Tensor:  # noqa: B006
        seen.append(float(output.detach().sum()))
        return mean_square(output, target)

    return loss, lambda: list(loss.__defaults__[0])  # type: ignore[index]


def of_enclosed_module() -> tuple[Loss, Told]:
    norm = nn.BatchNorm1d(8)

    def loss(output: Tensor, target: Any) -> Tensor:
        return mean_square(norm(output), target)

    return loss, lambda: [buffer.tolist() for buffer in norm.buffers()]


KINDS = [
    of_object,
    of_method,
    of_partial,
    of_closure,
    of_function_attribute,
    of_default,
    of_enclosed_module,
]


@pytest.mark.parametrize("costs", ["flops", "measured"])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_compile_leaves_the_state_of_a_loss(
    kind: Callable[[], tuple[Loss, Told]], costs: str
) -> None:
    loss, told = kind()
    before = told()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipecompile(model, X, k=2, microbatches=2, loss_fn=loss, costs=costs, sample_target=X)
    assert told() == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_call_changes_is_put_back(kind: Callable[[], tuple[Loss, Told]]) -> None:
    loss, told = kind()
    before = told()
    with callable_restored(loss):
        loss(X, X)
        assert told() != before
    assert told() == before
