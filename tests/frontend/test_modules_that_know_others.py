"""Modules that are one node and whose attributes lead back to them, as hooks of accelerate do."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.nn import functional

from tests.plain_loop import steps_alike


class Merged(nn.Linear):
    """A layer that has one of its methods as an attribute."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight_of = self.merged

    def merged(self) -> Tensor:
        return self.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight_of(), self.bias)


class KnowsItsRoot(nn.Module):
    """One that asks for data, and knows the model that it is part of."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        object.__setattr__(self, "root", root)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if y.sum() > 1e9 else y


def keeps_its_forward(model: nn.Sequential) -> None:
    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = self._old_forward(x) * 2  # type: ignore[operator]
        return result

    layer = model[0]
    layer._old_forward = layer.forward
    layer.forward = MethodType(doubled, layer)  # type: ignore[assignment]


def has_a_bound_forward(model: nn.Sequential) -> None:
    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 2, self.bias)

    model[0].forward = MethodType(doubled, model[0])  # type: ignore[assignment]


def lists_its_parent(model: nn.Sequential) -> None:
    model[0].parents = [model]  # type: ignore[assignment]


def has_a_method_as_attribute(model: nn.Sequential) -> None:
    model[0] = Merged()


def knows_its_root(model: nn.Sequential) -> None:
    model[0] = KnowsItsRoot(model)


def has_a_hook_of_accelerate(model: nn.Sequential) -> None:
    add_hook_to_module(model[0], ModelHook())


@pytest.mark.parametrize(
    "change",
    [
        keeps_its_forward,
        has_a_bound_forward,
        lists_its_parent,
        has_a_method_as_attribute,
        knows_its_root,
        has_a_hook_of_accelerate,
    ],
)
def test_they_train_as_unsplit(change: Callable[[nn.Sequential], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    change(model)
    steps_alike(model, [torch.randn(4, 8) for _ in range(2)])
