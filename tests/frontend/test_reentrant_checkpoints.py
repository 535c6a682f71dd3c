"""Gradients that torch adds up in parts, because of reentrant checkpoints, are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import mean_square, steps_alike
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint as checkpoints

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))

reentrant = partial(checkpoints.checkpoint, use_reentrant=True)
other = partial(checkpoints.checkpoint, use_reentrant=False)


class Model(nn.Module):
    """Three layers, and one tied to the first; `act` runs them."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied, self.act = nn.Linear(WIDTH, WIDTH), act
        self.tied.weight = self.one.weight

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.act(self, value)


SPLIT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "beside a region": lambda m, v: m.two(reentrant(m.two, m.one(v))),
    "in two regions": lambda m, v: reentrant(m.two, reentrant(m.two, m.one(v))),
    "tied": lambda m, v: m.two(reentrant(m.tied, m.one(v))),
    "a function": lambda m, v: reentrant(lambda h: functional.linear(h, m.two.weight), m.two(v)),
    "an operator": lambda m, v: reentrant(lambda h: h @ m.one.weight, m.two(m.one(v))),
    "regions of several": lambda m, v: m.one(
        checkpoints.checkpoint_sequential(
            [m.two, m.one, m.three], 3, m.three(v), use_reentrant=True
        )
    ),
}
WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "in one region": lambda m, v: reentrant(m.two, m.one(v)),
    "twice in a region": lambda m, v: reentrant(lambda h: m.two(m.two(h)), m.one(v)),
    "not reentrant": lambda m, v: m.two(other(m.two, m.one(v))),
    "detached": lambda m, v: reentrant(lambda h: h @ m.two.weight.detach(), m.one(v)) + v,
}


def pipeline_of(act: Callable[[Any, Tensor], Tensor]) -> Any:
    model = Model(act)
    return pipecompile(model, X, k=1, microbatches=4, loss_fn=mean_square, costs="flops")


@pytest.mark.parametrize("name", SPLIT)
def test_a_parameter_in_a_region_and_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"weight is used in a region .* use_reentrant=False"):
        pipeline_of(SPLIT[name])


@pytest.mark.parametrize("name", WHOLE)
def test_a_parameter_in_one_region_trains_as_in_a_loop(name: str) -> None:
    torch.manual_seed(0)
    pipeline = pipeline_of(WHOLE[name])
    pipeline.step(X)
    torch.manual_seed(0)
    model = Model(WHOLE[name])
    for rows in X.chunk(4):
        mean_square(model(rows), None).backward()
    for path, parameter in pipeline.named_parameters():
        wanted = model.get_parameter(path).grad
        assert wanted is None or torch.equal(parameter.grad, wanted / 4), path


def test_a_region_that_torch_gives_no_gradient_is_refused() -> None:
    """No input of the first region needs a gradient: in the model its layer trains nothing."""
    with pytest.raises(CaptureError, match=r"no input of checkpoint.* use_reentrant=False"):
        pipeline_of(lambda m, v: m.two(reentrant(m.three, v)))
    model = Model(lambda m, v: m.two(reentrant(m.three, v)))
    model.three.requires_grad_(False)
    pipecompile(model, X, k=1, microbatches=4, loss_fn=mean_square, costs="flops").step(X)


class OneNode(nn.Module):
    """Asks for data, so that it is one node, and has a checkpoint inside."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.checkpoint = nn.Linear(WIDTH, WIDTH), checkpoint

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if value.isnan().any():
            raise ValueError("not a number")
        return value + self.checkpoint(self.layer, value)


def test_a_checkpoint_inside_of_a_node() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OneNode(other), nn.Linear(WIDTH, WIDTH))
    steps_alike(model, [X, X])
    model[1].checkpoint = reentrant
    with pytest.raises(CaptureError, match=r"^1 .* one node cannot .* use_reentrant=False"):
        pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
