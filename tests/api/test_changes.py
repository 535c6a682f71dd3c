"""What changes after a model was compiled, or on other data than the sample, is an error and no wrong step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.errors import InputError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)
        self.scale = 2.0
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dim()
        return self.last(self.drop(self.first(x).tanh()) * self.scale)


def compiled(model: nn.Module, sample: Tensor = X, **options: Any) -> Pipeline:
    loss = nn.functional.mse_loss
    return pipecompile(model, sample, 2, microbatches=2, costs="flops", loss_fn=loss, sample_target=sample, **options)


def hooked(model: Scaled) -> None:
    model.register_forward_hook(lambda *_: None)


def replaced(model: Scaled) -> None:
    model.last = nn.Linear(8, 8)


def untied(model: Scaled) -> None:
    model.last.weight = nn.Parameter(torch.zeros(8, 8))


def scaled(model: Scaled) -> None:
    model.scale = 3.0


def dropped(model: Scaled) -> None:
    model.drop.p = 0.5


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (hooked, "_forward_hooks"),
        (replaced, "_modules"),
        (untied, "last._parameters"),
        (scaled, "scale"),
        (dropped, "drop.p"),
    ],
)
def test_a_model_that_changed_since_it_was_compiled(change: Any, name: str) -> None:
    model = Scaled()
    pipeline = compiled(model)
    pipeline.step(X, X)
    change(model)
    with pytest.raises(InputError, match=rf"^{name} is not what it was when the model was compiled"):
        pipeline.step(X, X)


def test_what_the_forward_sets_for_itself_may_change() -> None:
    model = Scaled()
    pipeline = compiled(model)
    model(X)
    assert model.seen == 2
    assert pipeline.step(X, X) is not None


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x.mul_(3)
        return x.sin()


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x * 1.5


@pytest.mark.parametrize("kind", [Writing, Passing])
def test_a_module_that_asks_data_does_to_its_argument_what_it_did_not_on_the_sample(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Hardtanh(-1, 1), kind(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipeline = compiled(model, -X.abs())
    assert pipeline.step(-X.abs(), X) is not None
    with pytest.raises(InputError, match=r"^1, which branches on data, wrote to its argument or gave it back"):
        pipeline.step(X.abs(), X)


class EvaluatedInPlace(nn.Module):
    """Writes to a view only in eval mode: there the write and who read before it share a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).sin()
        y = self.b(hidden * 2.0)
        if not self.training:
            hidden[:, :4].add_(y[:, :4])
        return self.c(hidden.relu() + y)


def test_evaluation_is_cut_around_its_own_writes() -> None:
    model = EvaluatedInPlace()
    pipeline = compiled(model, pin={"a": 0, "relu": 0, "b": 1})
    wanted = model.eval()(X).detach()
    model.train()
    assert torch.equal(pipeline.evaluate(X), wanted)
