"""Code that limits gradients in a backward is told that it is given those of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile

ROWS, MICROBATCHES, LIMIT = 8, 4, 1e-3
X = torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SAID = "does not grow with the loss"


class Backward(torch.autograd.Function):
    """Gives its input on, and changes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def shortened(gradient: Tensor) -> Tensor:
    return gradient * (LIMIT / gradient.norm(dim=1, keepdim=True)).clamp(max=1)


def reversed_(gradient: Tensor) -> Tensor:
    return -0.5 * gradient


class Changed(nn.Module):
    """Two layers, with something done to the gradient between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, 6) to another one."""
        return self.second(self.between(self.first(x).tanh()))


def by_function(change: Callable[[Tensor], Tensor]) -> nn.Module:
    return Changed(lambda x: Backward.apply(x, change))


def by_hook(change: Callable[[Tensor], Tensor]) -> nn.Module:
    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(change)
        return x

    return Changed(hooked)


def by_module_hook(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Changed(nn.Identity())
    model.first.register_full_backward_pre_hook(lambda _, gradients: (change(gradients[0]),))
    return model


def by_parameter(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Changed(nn.Identity())
    model.first.weight.register_hook(change)
    return model


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def total(output: Tensor, target: Tensor) -> Tensor:
    return mean(output, target) / MICROBATCHES


def gradients(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Return those of a step of the pipeline."""
    options = {"loss_fn": mean, **options}
    pipeline = pipecompile(
        model, X, k=2, microbatches=MICROBATCHES, sample_target=X, costs="flops", **options
    )
    pipeline.step(X, X)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = pytest.mark.parametrize("way", [by_function, by_hook, by_module_hook, by_parameter])


@WAYS
@pytest.mark.parametrize("change", [clamped, shortened])
def test_a_limit_is_told(way: Any, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    gradients(way(change).double())
    assert f"first.weight {SAID}" in caplog.text


@WAYS
def test_what_is_linear_is_not(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    gradients(way(reversed_).double())
    assert SAID not in caplog.text


@pytest.mark.parametrize("way", [by_function, by_hook, by_module_hook])
def test_the_advice_gives_the_gradients_of_the_whole_batch(
    way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = way(clamped).double()
    unsplit = deepcopy(model)
    mean(unsplit(X), X).backward()
    found = gradients(model, loss_fn=total, loss_reduction="sum")
    assert SAID not in caplog.text
    for name, parameter in unsplit.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)
