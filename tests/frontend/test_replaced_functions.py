"""Functions of torch and of others that a forward names, and what calls its modules: a step is
refused where one of them was replaced after the compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pipecompile import InputError, pipecompile
from pipecompile.frontend.outside_values import OutsideValues

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """A module of the user, which is taken apart."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return torch.tanh(value)


class Doubling:
    """A callable object."""

    def __call__(self, value: Tensor) -> Tensor:
        return value * 2


class Inheriting(Doubling):
    """What is called is that of the class above."""


OBJECT = Inheriting()
GLOBAL = Twice()


class Model(nn.Module):
    """Two layers with `act` between them."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.twice = act, nn.Sequential(Twice())

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.last(self.act(self.twice(self.first(value))))


def other(*args: Any, **_: Any) -> Any:
    return args[-1]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Any, str, str]] = {
    "a function": (lambda x: F.gelu(x), F, "gelu", "torch.nn.functional.gelu"),
    "by its whole name": (
        lambda x: torch.nn.functional.silu(x),
        F,
        "silu",
        "torch.nn.functional.silu",
    ),
    "one of torch": (lambda x: torch.tanh(x), torch, "tanh", "torch.tanh"),
    "in a part of torch": (
        lambda x: torch.special.expit(x),
        torch.special,
        "expit",
        "torch.special.expit",
    ),
    "an operator": (lambda x: x * 2, Tensor, "__mul__", "torch.Tensor.__mul__"),
    "of Python": (lambda x: x * math.sqrt(2.0), math, "sqrt", "math.sqrt"),
    "of numpy": (lambda x: x * float(np.log(3.0)), np, "log", "numpy.log"),
    "a call of a module": (lambda x: x, Twice, "__call__", "Twice.__call__"),
    "a container of torch": (lambda x: x, nn.Sequential, "forward", "Sequential.forward"),
    "a module in a global": (lambda x: GLOBAL(x), Twice, "__call__", "Twice.__call__"),
    "a class below": (lambda x: OBJECT(x), Inheriting, "__call__", "Inheriting.__call__"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_replaces_a_function_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, owner, attribute, place = CASES[name]
    values = OutsideValues(Model(act))
    assert values.changed() is None
    monkeypatch.setattr(owner, attribute, other, raising=False)
    assert values.changed() == place
    monkeypatch.undo()
    assert values.changed() is None


def test_functions_that_no_code_names_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    values = OutsideValues(Model(CASES["a function"][0]))
    monkeypatch.setattr(F, "hinge_embedding_loss", other)
    monkeypatch.setattr(nn.Tanh, "forward", other)
    assert values.changed() is None


@pytest.mark.parametrize("name", ["a function", "a call of a module"])
def test_a_step_with_another_function_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, owner, attribute, place = CASES[name]
    loss = nn.functional.mse_loss
    pipeline = pipecompile(Model(act), X, k=2, microbatches=2, costs="flops", loss_fn=loss)
    pipeline.step(X, X)
    monkeypatch.setattr(owner, attribute, other)
    with pytest.raises(InputError, match=f"{place} has changed since the model was compiled"):
        pipeline.step(X, X)
