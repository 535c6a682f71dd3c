"""What a forward or a backward raises is said in one line, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import CaptureError, InputError, pipecompile
from pipecompile.runtime.stage_failures import ExplainedBackward
from pipecompile.training.pipeline import Pipeline

WIDTH = 8
X = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(0)) + 1
HALVES = torch.full_like(X, 0.5)


class Writing(nn.Module):
    """Multiplies by a buffer, and on some data writes before."""

    def __init__(
        self, write: Callable[[Writing], Any], writes: Callable[[Tensor], bool], *, copies: bool
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("row", torch.ones(1, WIDTH))
        self.write, self.writes, self.copies = write, writes, copies

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if self.writes(x):
            with torch.no_grad():
                self.write(self)
        scale, row = (each.clone() if self.copies else each for each in (self.scale, self.row))
        return self.layer(x).tanh() * scale * row


def at_one_half(x: Tensor) -> bool:
    """On data that the self-check does not try, so that only a step writes."""
    return bool(x[0, 0] == 0.5)


def compiled(
    write: Callable[[Writing], Any],
    writes: Callable[[Tensor], bool] = at_one_half,
    *,
    copies: bool = False,
    **options: Any,
) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(write, writes, copies=copies)),
        # So many that the part lies in the first stage, with several microbatches in flight.
        *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
    )
    # The part that branches reads the sample itself.
    model[0][0].weight.data.copy_(torch.eye(WIDTH))
    model[0][0].bias.data.zero_()
    return pipecompile(
        model,
        X,
        k=2,
        microbatches=4,
        costs="flops",
        loss_fn=lambda out, _: out.square().mean(),
        **options,
    )


def a_part(module: Writing) -> None:
    module.scale[2:4] = 2.0


WRITES: dict[str, tuple[Callable[[Writing], Any], str]] = {
    "a buffer": (lambda m: m.scale.mul_(1.1), "0.1.scale"),
    "a part of it": (a_part, "0.1.scale"),
    "a view of it": (lambda m: m.row.view(2, -1).add_(1.0), "0.1.row"),
    "a running mean": (lambda m: m.scale.lerp_(torch.zeros(WIDTH), 0.1), "0.1.scale"),
    "several at once": (lambda m: torch._foreach_mul_([m.scale, m.row], 2.0), "0.1."),
    "the result of an operator": (
        lambda m: torch.mul(m.row, 2.0, out=m.row),
        "0.1.row",
    ),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("what", WRITES)
def test_what_only_other_data_writes_is_named(what: str) -> None:
    write, name = WRITES[what]
    pipeline = compiled(write, schedule="zb-h1" if what == "a buffer" else "1f1b")
    assert torch.isfinite(pipeline.step(X))
    with pytest.raises(InputError, match=r"has written in place to 0\.1") as caught:
        pipeline.step(HALVES)
    message = str(caught.value)
    assert name in message and "(clone)" in message and "\n" not in message
    assert "inplace operation" in str(caught.value.__cause__)


def test_what_has_no_name_is_told_by_its_shape() -> None:
    value, factor = torch.ones(3, 5), torch.ones(3, 5, requires_grad=True)
    product = (value * factor).sum()
    value.mul_(2)
    with (
        pytest.raises(InputError, match=r"has written in place to a tensor of shape \[3, 5\]"),
        ExplainedBackward(nn.Linear(2, 2)),
    ):
        product.backward()
    again = factor.exp().sum()
    again.backward()
    with pytest.raises(InputError, match="second time"), ExplainedBackward(nn.Linear(2, 2)):
        again.backward()


def test_the_advice_works() -> None:
    """With copies the same data trains, and each microbatch sees what it would in a plain loop."""
    pipeline = compiled(lambda m: m.scale.mul_(1.1), copies=True)
    assert torch.isfinite(pipeline.step(HALVES))
    once = compiled(lambda m: m.scale.mul_(1.1))
    with pytest.raises(InputError):
        once.step(HALVES)


@pytest.mark.parametrize(
    "write",
    [lambda m: m.scale.data.mul_(1.1), lambda m: m.scale.mul_(1.1)],
    ids=["unseen by autograd", "seen"],
)
def test_a_write_on_data_that_the_self_check_tries_is_refused_at_once(
    write: Callable[[Writing], Any],
) -> None:
    with pytest.raises(CaptureError, match="with two microbatches in flight"):
        compiled(write, lambda x: bool(x.sum() < 0))
    compiled(write, lambda x: bool(x.sum() < 0), copies=True)


class Applying(nn.Module):
    """A layer after a function; one node, if the function branches on data."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        """Values of shape (N, WIDTH) to the same shape."""
        return self.layer(self.function(x))


def asserted(x: Tensor) -> Tensor:
    assert x.abs().max() < 1e4, "too large"
    return x


FAILURES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "indices beyond a table": (torch.tanh, "IndexError: index out of range"),
    "an assertion": (asserted, "AssertionError: too large"),
    "no positive definite matrix": (
        lambda x: x @ torch.linalg.cholesky(torch.eye(WIDTH) * (1e4 - x.abs().max())),
        "LinAlgError",
    ),
    "a hook on a gradient": (
        torch.tanh,
        "backward of a microbatch raised AssertionError: too large",
    ),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_a_model_raises_on_other_data_is_said_with_its_type(what: str) -> None:
    check, text = FAILURES[what]
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(10, WIDTH), Applying(check)), torch.arange(8)
    with torch.no_grad():
        model[0].weight[9] = 1e5
    in_backward = what == "a hook on a gradient"
    if in_backward:
        model[1].layer.weight.register_hook(asserted)
    pipeline = pipecompile(
        model,
        ids,
        k=2,
        microbatches=2,
        costs="flops",
        loss_fn=lambda out, wanted: (out * wanted).sum(),
    )
    wrong = torch.full_like(ids, 10 if what == "indices beyond a table" else 9)
    with pytest.raises(InputError, match=text) as caught:
        pipeline.step(wrong, torch.tensor(1e9 if in_backward else 1.0))
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None
    if not in_backward:
        with pytest.raises(InputError, match=text):
            pipeline.evaluate(wrong)
    # Nothing of the failed step is left.
    pipeline.zero_grad()
    assert torch.isfinite(pipeline.step(ids, torch.tensor(1.0)))
