"""Tensors that are no parameters of the model, and get gradients from its backward, are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop import mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError, InputError
from pipecompile.training.pipeline import Pipeline

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
SCALE = nn.Parameter(torch.ones(WIDTH))


class Reading(nn.Module):
    """Two layers, between which `read` may use what the module holds."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor], held: Any = None) -> None:
        super().__init__()
        self.one, self.two, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), read
        self.held = held

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.two(self.read(self, self.one(value)))


class Enclosing(nn.Module):
    """One node, since it asks for data; it has a layer that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.layers[0](value) if float(value.detach().abs().max()) < 1e6 else value * 0


def with_buffer() -> Reading:
    model = Reading(lambda self, value: value * self.scale)
    model.register_buffer("scale", torch.ones(WIDTH, requires_grad=True))
    return model


def with_node() -> Reading:
    model = Reading(lambda self, value: self.node(value))
    model.node = Enclosing()
    return model


def compiled(model: nn.Module, **options: Any) -> Pipeline:
    return pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops", **options)


def ones() -> Tensor:
    return torch.ones(WIDTH, requires_grad=True)


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, tuple[Callable[[], Reading], str]] = {
    "an attribute": (
        lambda: Reading(lambda self, value: value * self.held, ones()),
        "held of shape",
    ),
    "a buffer": (with_buffer, "scale of shape"),
    "a global parameter": (lambda: Reading(lambda _, value: value * SCALE), "a tensor of shape"),
    "one in a list": (
        lambda: Reading(lambda self, value: value * self.held[0], [ones()]),
        "a tensor of shape",
    ),
    "a layer in a list": (
        lambda: Reading(lambda self, value: self.held[0](value), [layer()]),
        "a tensor of shape",
    ),
    "a layer in an object": (
        lambda: Reading(lambda self, value: self.held.layer(value), SimpleNamespace(layer=layer())),
        "a tensor of shape",
    ),
    "an argument of a partial function": (
        lambda: Reading(lambda self, value: self.held(value), partial(torch.mul, ones())),
        "a tensor of shape",
    ),
    "one that a node encloses": (with_node, "a tensor of shape"),
}


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_parameter_and_gets_a_gradient_is_refused(name: str, self_check: bool) -> None:
    make, text = MODELS[name]
    SCALE.grad = None
    model = make()
    with pytest.raises(CaptureError, match=rf"{text} .* gets a gradient, but is no parameter"):
        compiled(model, self_check=self_check)
    held = model.held
    assert SCALE.grad is None and (not isinstance(held, Tensor) or held.grad is None)


ALLOWED: dict[str, Callable[[], Reading]] = {
    "detached": lambda: Reading(lambda self, value: value * self.held.detach(), ones()),
    "under no_grad": lambda: Reading(
        lambda self, value: value + torch.no_grad()(lambda: self.held[0](value))(), [layer()]
    ),
    "frozen": lambda: Reading(
        lambda self, value: self.held[0](value), [layer().requires_grad_(False)]
    ),
    "made by the forward": lambda: Reading(
        lambda _, value: value + value.detach().requires_grad_() * 2
    ),
    "a reason for a checkpoint": lambda: Reading(
        lambda self, value: checkpoint(
            lambda given, _: torch.tanh(given), value, self.held, use_reentrant=True
        ),
        ones(),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_gets_no_lasting_gradient_is_allowed(name: str) -> None:
    compiled(ALLOWED[name]()).step(X)


FROZEN = nn.Parameter(torch.ones(WIDTH), requires_grad=False)


class Shifting(nn.Linear):
    """One node, since it is a kind of nn.Linear, with a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return super().forward(value) + self.shift


def shifting() -> Reading:
    model = Reading(lambda self, value: self.node(value))
    model.node = Shifting()
    return model


def with_frozen_buffer() -> Reading:
    model = with_buffer()
    model.scale.requires_grad_(False)
    return model


LATER: dict[str, tuple[Callable[[], Reading], Callable[[Reading], Tensor], str]] = {
    "a buffer": (with_frozen_buffer, lambda model: model.scale, "scale"),
    "a buffer of a node": (shifting, lambda model: model.node.shift, "node.shift"),
    "an attribute": (
        lambda: Reading(lambda self, value: value * self.held, torch.ones(WIDTH)),
        lambda model: model.held,
        "held",
    ),
    "one in a list": (
        lambda: Reading(lambda self, value: value * self.held[0], [torch.ones(WIDTH)]),
        lambda model: model.held[0],
        "held",
    ),
    "a global parameter": (
        lambda: Reading(lambda _, value: value * FROZEN),
        lambda _: FROZEN,
        "FROZEN",
    ),
    "a layer in a list": (ALLOWED["frozen"], lambda model: model.held[0].weight, "weight"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_requires_a_gradient_only_after_the_compile_is_refused(name: str) -> None:
    make, tensor_of, place = LATER[name]
    model = make()
    pipeline, tensor = compiled(model), tensor_of(model)
    pipeline.step(X)
    tensor.requires_grad_()
    try:
        with pytest.raises(InputError, match=rf"whether .*{place} requires a gradient has changed"):
            pipeline.step(X)
    finally:
        tensor.requires_grad_(False)
    assert tensor.grad is None
    pipeline.step(X)


class Gathering(Reading):
    """A forward that adds what has a gradient to a buffer."""

    def __init__(self) -> None:
        super().__init__(lambda self, value: value)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        hidden = self.one(value)
        self.total.add_(hidden.mean(0))
        return self.two(hidden)


def test_a_buffer_that_the_forward_lets_require_a_gradient_is_refused() -> None:
    model = Gathering()
    with pytest.raises(CaptureError, match="the forward writes to total what has a gradient"):
        compiled(model)
    assert model.total.is_leaf and not model.total.requires_grad and not model.total.any()
