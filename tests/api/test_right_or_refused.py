"""What once ended in an error of torch: it trains as in a plain loop, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import steps_alike
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from traps import WIDTH

from pipecompile import CaptureError, InputError, pipecompile

BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(3)]
X = BATCHES[0]


def between(layer: nn.Module) -> nn.Module:
    """Two layers with another one between them."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer, nn.Linear(WIDTH, WIDTH))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "computed",
    [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_weights_that_hooks_compute(
    computed: Callable[[nn.Module], nn.Module], has_run: bool
) -> None:
    torch.manual_seed(0)
    steps_alike(between(computed(nn.Linear(WIDTH, WIDTH))), BATCHES)
    if has_run:  # then the weight carries a gradient, and `deepcopy` would refuse the model
        model = between(computed(nn.Linear(WIDTH, WIDTH)))
        model(X)
        pipecompile(model, X, k=2, costs="flops", loss_fn=nn.functional.mse_loss).step(X, X)


class Sloped(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return torch.autograd.grad((value**3).sum(), value, create_graph=True)[0]


class Sparse(nn.Module):
    """Has a sparse buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("rows", torch.eye(WIDTH).to_sparse(layout=layout))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return (self.rows @ value.T).T


NESTED = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(4, WIDTH)])
COMPILES: dict[str, tuple[Any, Any, str]] = {
    "a function": (torch.sin, X, "the model is a builtin_function_or_method, but must be"),
    "a sparse input": (between(nn.Tanh()), torch.eye(8).to_sparse(), "an input is sparse_coo"),
    "a CSR input": (between(nn.Tanh()), torch.eye(8).to_sparse_csr(), "an input is sparse_csr"),
    "a nested input": (between(nn.Tanh()), NESTED, "an input is nested"),
    "a sparse buffer": (between(Sparse(torch.sparse_coo)), X, "2.rows is sparse_coo"),
    "a CSR buffer": (between(Sparse(torch.sparse_csr)), X, "2.rows is sparse_csr"),
    "a gradient": (between(Sloped()), X, "the forward calls torch.autograd.grad"),
}


@pytest.mark.parametrize("what", COMPILES)
def test_what_cannot_be_compiled_is_refused_in_one_line(what: str) -> None:
    model, batch, message = COMPILES[what]
    with pytest.raises((InputError, CaptureError)) as caught:
        pipecompile(model, batch, k=2, costs="flops", loss_fn=nn.functional.mse_loss)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def square(output: Tensor, target: Any) -> Tensor:
    return nn.functional.mse_loss(output, target)


STEPS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, bool, str]] = {
    "no target": (square, None, True, "give the step one: step(batch, target)"),
    "a detached loss": (lambda o, _: o.detach().sum(), X, True, "the loss carries no gradient"),
    "a loss of indices": (lambda o, _: o.argmax().float(), X, True, "the loss carries no gradient"),
    "nothing to train": (square, X, False, "the loss carries no gradient"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_trains_nothing_is_refused(what: str) -> None:
    loss_fn, target, trains, message = STEPS[what]
    model = between(nn.Tanh()).requires_grad_(trains)
    pipeline = pipecompile(model, X, k=2, costs="flops", loss_fn=loss_fn)
    with pytest.raises(InputError) as caught:
        pipeline.step(X, target)
    assert message in str(caught.value)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_so_is_one_without_gradients_around_it(without: Callable[[], Any]) -> None:
    pipeline = pipecompile(between(nn.Tanh()), X, k=2, costs="flops", loss_fn=square)
    with without(), pytest.raises(InputError, match="gradients are switched off around it"):
        pipeline.step(X, X)
    pipeline.step(X, X)
