"""What a data-dependent module returns must be like what it returned on the sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import InputError, Pipeline, pipecompile

WIDTH = 8
POSITIVE = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(0)) + 1


class Branching(nn.Module):
    """Returns one function of its input, which has a gradient, or another, as data says."""

    def __init__(self, positive: Callable[[Tensor], Any], negative: Callable[[Tensor], Any]):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.positive, self.negative = positive, negative

    def forward(self, x: Tensor) -> Any:
        return (self.positive if x.mean() > 0 else self.negative)(self.layer(x))


class Around(nn.Module):
    """A data-dependent module between layers; `read` reads a tensor out of its result."""

    def __init__(self, inner: nn.Module, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(self.inner(x)).float().tanh())


def itself(value: Any) -> Any:
    return value


def double(value: Tensor) -> Tensor:
    return value * 2


UNLIKE: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], str]] = {
    "a type": (double, Tensor.half, itself, "torch.float16 with a gradient, and on"),
    "whole numbers": (double, Tensor.long, itself, "a tensor (2, 8) of torch.int64, and on"),
    "a shape": (double, lambda v: v[:1], itself, "a tensor (1, 8) of torch.float32"),
    "a gradient": (Tensor.detach, double, itself, "with a gradient, and on"),
    "a flag": (
        lambda v: (v, True),
        lambda v: (v, False),
        lambda pair: pair[0] * (1 if pair[1] else -1),
        "returned False, and on the sample that the model was cut by True",
    ),
    "nothing": (
        lambda v: {"out": v, "bias": v},
        lambda v: {"out": v, "bias": None},
        lambda found: found["out"] if found["bias"] is None else found["out"] + found["bias"],
        "returned None, and on",
    ),
    "fewer values": (
        lambda v: [v, v],
        lambda v: [v],
        lambda found: found[0] * len(found),
        "returned nothing, and on",
    ),
}


def compiled(model: nn.Module) -> Pipeline:
    """Two stages and four microbatches of the sample."""
    return pipecompile(
        model,
        POSITIVE,
        k=2,
        microbatches=4,
        loss_fn=lambda out, _: out.square().mean(),
        costs="flops",
    )


@pytest.mark.parametrize("what", UNLIKE)
def test_a_result_unlike_that_on_the_sample_is_refused(what: str) -> None:
    positive, negative, read, words = UNLIKE[what]
    torch.manual_seed(0)
    model = Around(Branching(positive, negative), read)
    pipeline = compiled(model)
    assert torch.isfinite(pipeline.step(POSITIVE))
    with pytest.raises(InputError, match=r"^inner branches on data: on this input") as caught:
        pipeline.step(-POSITIVE)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_branch_may_do_without_a_gradient() -> None:
    torch.manual_seed(0)
    model = Around(Branching(double, Tensor.detach), itself)
    pipeline = compiled(model)
    pipeline.step(-POSITIVE)
    assert model.inner.layer.weight.grad is None and model.last.weight.grad is not None


def transposed(value: Tensor) -> Tensor:
    return value.T.contiguous().T


class AtOneHalf(Branching):
    """Branches on what the self-check does not try, so that only a step can see the other way."""

    def forward(self, x: Tensor) -> Any:
        return (self.negative if x[0, 0].item() == 0.5 else self.positive)(self.layer(x))


LAYOUT_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "is_contiguous": lambda v: v * (2 if v.is_contiguous() else 3),
    "stride": lambda v: v * v.stride(1),
    "a later view": lambda v: v * (2 if v.view(2, 2, -1).is_contiguous() else 3),
}


@pytest.mark.parametrize("read", LAYOUT_READS.values(), ids=LAYOUT_READS)
def test_another_layout_is_refused_where_the_forward_asks_for_it(
    read: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    pipeline = pipecompile(
        Around(AtOneHalf(Tensor.clone, transposed), read),
        POSITIVE,
        k=2,
        microbatches=4,
        loss_fn=lambda out, _: out.square().mean(),
        costs="flops",
    )
    assert torch.isfinite(pipeline.step(POSITIVE))
    with pytest.raises(InputError, match=r"inner branches on data: .* with strides \(1, 2\)"):
        pipeline.step(torch.full_like(POSITIVE, 0.5))
