"""What goes through a part of a model as it is: a parameter through a module that does nothing, a
module through a conversion to the type that it has, and no gradient through a Function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import mean_square, steps_alike
from torch import Tensor, nn
from traps import WIDTH, Two, refused

from pipecompile import pipecompile

BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2)]


class Returned(nn.Module):
    """A leaf of one's own that asks for data, and returns what it is given."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of any shape."""
        return value * 2 if value.detach().sum() > 1e9 else value


class Embedded(Two):
    """Adds a parameter that goes through `through` before."""

    def __init__(self, through: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, WIDTH))
        self.through, self.use = through, use

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        value = self.use(self.first(value), self.through(self.position))
        return self.second(value.tanh())


THROUGH: dict[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Dropout(0)": lambda: nn.Dropout(0.0),
    "a dropout in eval mode": lambda: nn.Dropout(0.5).eval(),
    "two of them": lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.0)),
    "a leaf of the user": Returned,
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda value, position: value + position,
    "a part": lambda value, position: value + position[0],
    "expanded": lambda value, position: value * position.expand(len(value), -1),
    "beside rows": lambda value, position: torch.cat([value, position])[:-1],
}


@pytest.mark.parametrize("through", THROUGH)
def test_a_parameter_goes_through_a_module(through: str) -> None:
    steps_alike(Embedded(THROUGH[through](), USES["added"]), BATCHES)


@pytest.mark.parametrize("use", USES)
def test_so_it_does_whatever_reads_it(use: str) -> None:
    steps_alike(Embedded(nn.Dropout(0.0), USES[use]), BATCHES)


def test_its_costs_are_measured() -> None:
    model = Embedded(nn.Identity(), USES["added"])
    options: dict[str, Any] = {"loss_fn": mean_square, "costs": "measured"}
    pipecompile(model, BATCHES[0], k=2, microbatches=2, **options).step(BATCHES[0], None)


class Converted(Two):
    """Converts a layer in each forward."""

    def __init__(self, convert: Callable[[nn.Module, Tensor], nn.Module]) -> None:
        super().__init__()
        self.convert = convert

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.second = self.convert(self.second, value)
        return self.second(self.first(value).tanh())


CONVERSIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "to the type of the input": lambda layer, value: layer.to(value.dtype),
    "to its device": lambda layer, value: layer.to(value.device),
    "to both": lambda layer, value: layer.to(value),
    "float": lambda layer, _: layer.float(),
    "cpu": lambda layer, _: layer.cpu(),
    "type": lambda layer, value: layer.type(value.dtype),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_module_is_converted_to_what_it_is(name: str) -> None:
    steps_alike(Converted(CONVERSIONS[name]), BATCHES)


def test_a_conversion_to_another_type_is_refused() -> None:
    model = Converted(lambda layer, _: layer.double().float())
    refused(model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


class Stopped(torch.autograd.Function):
    """Doubles a value, and lets no gradient through."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return 2 * value

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:  # type: ignore[override]
        """No gradient."""


class Stopping(Two):
    """Stops all gradients, or those of one of two paths."""

    def __init__(self, *, passes: bool) -> None:
        super().__init__()
        self.passes = passes

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        value = self.first(value)
        stopped: Tensor = Stopped.apply(value)  # type: ignore[no-untyped-call]
        return self.second((stopped + value if self.passes else stopped).tanh())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("passes", [False, True])
def test_a_function_may_return_no_gradient(schedule: str, passes: bool) -> None:
    steps_alike(Stopping(passes=passes), BATCHES, schedule=schedule)
