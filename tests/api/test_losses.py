"""Loss functions of many kinds: they train as in a plain loop, or are refused in one line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from traps import WIDTH

from pipecompile import InputError, Pipeline, pipecompile

X, Y = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


READS_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda o, t: square(o, t) * (2.0 if o.detach().mean().item() > 0 else 3.0),
    "float": lambda o, t: square(o, t) * float(o.detach().abs().max()),
    "a branch": lambda o, t: square(o, t) if (t > 9).any() else o.abs().mean(),
    "a selection": lambda o, t: (o - t)[t > 0].square().mean(),
    "nonzero": lambda o, t: o[t[:, 0].nonzero()[:, 0]].square().mean(),
    "numpy": lambda o, t: square(o, t) * float(numpy.abs(o.detach().numpy()).max()),
    "a list": lambda o, t: square(o, t) * max(o.detach().flatten().tolist()),
}


@pytest.mark.parametrize("name", READS_VALUES)
def test_a_loss_that_reads_values_trains_and_is_not_counted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    loss_fn, model = READS_VALUES[name], layers()
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": loss_fn}
    pipeline = pipecompile(model, X, sample_target=Y, **options)
    assert "costs leave out the loss" in caplog.text
    assert_steps_as_a_loop(pipeline, model, loss_fn)


def penalty(output: Tensor, target: Tensor, *, create_graph: bool) -> Tensor:
    """A loss with a penalty on its own gradient, which may be a constant."""
    loss = (output.tanh() - target).square().mean()
    options = {"create_graph": create_graph, "retain_graph": True}
    (gradient,) = torch.autograd.grad(loss, output, **options)
    return loss + 100 * gradient.square().sum()


@pytest.mark.parametrize("costs", ["flops", "measured"])
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_loss_may_differentiate_by_itself(costs: Any, create_graph: bool) -> None:
    model, loss_fn = layers(), partial(penalty, create_graph=create_graph)
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": costs, "loss_fn": loss_fn}
    pipeline = pipecompile(model, X, sample_target=Y, **options)
    assert_steps_as_a_loop(pipeline, model, loss_fn)


def taking_out() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that has a scale for twenty calls."""
    scales = [1.0] * 20
    return lambda output, target: square(output, target) * scales.pop()


def of_one_size() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that keeps the last output, and fails on one without values after one with them."""
    kept = list[Any]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        before, kept[:] = list(kept), [output.detach()]
        assert not before or type(before[0]) is type(output.detach())
        return square(output, target)

    return loss


def that_fails_when_profiled() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that fails on outputs without values that require gradients."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert type(output) is Tensor or "observe" not in "".join(traceback.format_stack())
        return square(output, target)

    return loss


@pytest.mark.parametrize("made", [taking_out, of_one_size, that_fails_when_profiled])
def test_the_cost_of_a_loss_is_no_reason_to_fail(
    made: Callable[[], Callable[[Tensor, Tensor], Tensor]],
) -> None:
    model, loss_fn = layers(), made()
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": loss_fn}
    for self_check in (True, False):
        pipeline = pipecompile(model, X, sample_target=Y, self_check=self_check, **options)
        model.zero_grad()
        assert_steps_as_a_loop(pipeline, model, loss_fn)


def assert_steps_as_a_loop(
    pipeline: Pipeline, model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> None:
    loss = pipeline.step(X, Y)
    unsplit = layers()
    losses = [loss_fn(unsplit(x), y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
    assert torch.equal(loss, torch.stack(losses).mean())
    for each in losses:
        (each / 2).backward()
    gradients = [parameter.grad for parameter in unsplit.parameters()]
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert expected is not None and torch.equal(parameter.grad, expected)


class Counting(nn.Module):
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Two tensors of shape (N, WIDTH) to a scalar."""
        self.calls += 1
        return square(output, target)


@pytest.mark.parametrize("costs", ["flops", "measured"])
def test_a_compile_leaves_a_loss_as_it_was(costs: str) -> None:
    loss_fn = Counting()
    pipeline = pipecompile(
        layers(), X, k=2, microbatches=4, costs=costs, loss_fn=loss_fn, sample_target=Y
    )
    assert not loss_fn.calls
    pipeline.step(X, Y)
    assert loss_fn.calls == 4


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("loss_fn", "target", "words"),
    [
        (lambda o, _: o.to(torch.complex64).sum(), Y, "a tensor of type torch.complex64"),
        (lambda o, _: o.sum().reshape(1), Y, r"a tensor of shape \(1,\)"),
        (lambda o, _: o.sum().item(), Y, "a float"),
        (lambda o, _: {"loss": o.sum()}, Y, "a dict"),
        (lambda o, _: None, Y, "a NoneType"),
        (lambda o, _: o.detach().sum(), Y, "the loss carries no gradient"),
        (square, Y.numpy(), r"the target is a numpy.ndarray of shape \(8, 8\)"),
        (square, {"y": Y.numpy()}, r"the target\['y'\] is a numpy.ndarray"),
        (square, Y[:1], r"the target is of shape \(1, 8\), but the batch has 8 samples"),
        (square, [*Y], "the target is a list of 8"),
    ],
)
def test_what_is_no_loss_or_target_is_refused(
    loss_fn: Callable[..., Any], target: Any, words: str
) -> None:
    pipeline = pipecompile(layers(), X, k=2, costs="flops", loss_fn=loss_fn, microbatches=2)
    with pytest.raises(InputError, match=words):
        pipeline.step(X, target)
