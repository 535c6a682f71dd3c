"""Losses that read what the forward leaves on modules, which stages do not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from tests.plain_loop import steps_alike

Loss = Callable[[Any, Any], Tensor]


class Parts(nn.Module):
    """Two layers; `scale` is set in the forward."""

    scale: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        value = self.first(x)
        self.scale = self.scale_of(value)
        result: Tensor = self.second(value.tanh())
        return result

    def scale_of(self, value: Tensor) -> Any:
        return value.detach().abs().mean()


class Gate(nn.Module):
    """A gate that notes its load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.load = nn.Linear(8, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.load = weights.detach().mean(0)
        return x + weights.sum(-1, keepdim=True) * x


class Returned(Parts):
    """It returns what it sets, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale

    def scale_of(self, value: Tensor) -> Any:
        return value.square().mean()


class Number(Parts):
    def scale_of(self, value: Tensor) -> Any:
        return float(value.shape[0])


class Criterion:
    """An object that holds the model."""

    def __init__(self, model: Parts) -> None:
        self.model = model

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        return (output * self.model.scale).square().mean()


class CriterionModule(nn.Module):
    """The same as a module, which does not register the model."""

    def __init__(self, model: Parts) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        self.model: Parts

    def forward(self, output: Tensor, target: Any) -> Tensor:
        return (output * self.model.scale).square().mean()


def by_name() -> tuple[nn.Module, Loss]:
    model = Parts()
    return model, lambda output, _: (output * getattr(model, "scale")).square().mean()  # noqa: B009


def of_a_gate() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Linear(8, 8), Gate(), nn.Linear(8, 8))
    return model, lambda output, _: output.square().mean() * (1 + model[1].load.max())


def returned_too() -> tuple[nn.Module, Loss]:
    model = Returned()
    return model, lambda output, _: output[0].square().mean() + model.scale


def a_number() -> tuple[nn.Module, Loss]:
    model = Number()
    return model, lambda output, _: output.square().sum() / (model.scale or 1)


def in_an_object() -> tuple[nn.Module, Loss]:
    model = Parts()
    return model, Criterion(model)


def in_a_module() -> tuple[nn.Module, Loss]:
    model = Parts()
    return model, CriterionModule(model)


@pytest.mark.parametrize(
    "made", [by_name, of_a_gate, returned_too, a_number, in_an_object, in_a_module]
)
def test_they_are_refused(made: Callable[[], tuple[nn.Module, Loss]]) -> None:
    model, loss = made()
    x, rows = torch.randn(4, 8), torch.zeros(4)

    def with_target(output: Any, target: Tensor) -> Tensor:
        return loss(output, target) + target.sum()

    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops"}
    # Without a target the compile cannot call the loss.
    pipeline = pipecompile(model, x, loss_fn=with_target, **options)
    with pytest.raises(InputError, match="which the model's forward sets"):
        pipeline.step(x, rows)
    assert "__getattribute__" not in vars(nn.Module)
    if made is not a_number:  # the same in each microbatch
        with pytest.raises(InputError, match="loss_fn uses what the forward leaves"):
            pipecompile(model, x, loss_fn=with_target, sample_target=rows, **options)


def test_what_is_returned_may_be_read() -> None:
    steps_alike(
        Returned(),
        [torch.randn(4, 8) for _ in range(3)],
        loss_fn=lambda output, _: output[0].square().mean() + output[1],
    )


def test_what_no_forward_sets_may_be_read() -> None:
    model = Parts()
    model.factor = 2.0  # type: ignore[assignment]
    steps_alike(
        model,
        [torch.randn(4, 8) for _ in range(3)],
        loss_fn=lambda output, _: output.square().mean() * model.factor,
    )
