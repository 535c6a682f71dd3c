"""Patches of torch: redirected autograd functions, other randomness, and own saved-tensor hooks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from traps import CALL, WIDTH, Two, X, refused
from zoo import called
from zoo.exact import exact

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.frontend.target import Target, sum_of_squares


class Exaggerated(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 100


def test_inlined_autograd_function() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(Exaggerated.apply(self.first(x)))

    assert called(exact(Trap(), X).graph) == ["first", "apply", "second"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    class Trap(Two):
        def region(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.second(x).sin(), 0.3, self.training)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, self.first(x), use_reentrant=reentrant)

    assert called(exact(Trap(), X).graph) == ["first", "second", "sin", "dropout"]


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(np.random.rand, "numpy's"), (random.random, "Python's")],
    ids=["numpy", "python"],
)
def test_random_numbers_of_others(draw: Callable[[], float], whose: str) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if draw() < 2 else x

    before = np.random.get_state()[1].copy(), random.getstate()
    refused(Trap(), f"{whose} random module")
    assert (np.random.get_state()[1] == before[0]).all()
    assert random.getstate() == before[1]


def test_own_torch_generator() -> None:
    generator = torch.Generator()

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + torch.rand(WIDTH, generator=generator)

    refused(Trap(), "torch.Generator of its own", "test_torch_patches.py:")


def seeded_and_set_back(number: int) -> None:
    """Seeds within a fork, after which the generator is as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(number)


def state_set(_: int) -> None:
    """Sets the state that there is."""
    torch.set_rng_state(torch.get_rng_state())


@pytest.mark.parametrize(
    "seed",
    [
        torch.manual_seed,
        torch.random.default_generator.manual_seed,
        seeded_and_set_back,
        state_set,
        lambda _: torch.seed(),
    ],
)
def test_seeding_in_the_forward(seed: Callable[[int], object]) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            seed(0)
            return nn.functional.dropout(self.first(x), 0.5, self.training)

    model, before = Trap(), torch.get_rng_state()
    refused(model, "seeds torch's generator", "seed outside the model")
    assert torch.equal(torch.get_rng_state(), before)


exaggerated = Exaggerated.apply


def test_function_whose_apply_was_bound_before() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(exaggerated(self.first(x)))

    if isinstance(torch.autograd.Function.__dict__["apply"], classmethod):
        assert called(exact(Trap(), X).graph) == ["first", "apply", "second"]
    else:
        # From torch 2.15 on it is a method of C, which cannot be redirected.
        refused(Trap(), "calls Exaggerated.apply under another name")
    assert torch.equal(exaggerated(X), X.sin())  # and is torch's again


def doubled(x: Tensor) -> Tensor:
    return x * 2


class OwnHooks(torch.autograd.graph.saved_tensors_hooks):
    """A subclass of torch's hooks."""

    def __init__(self) -> None:
        super().__init__(doubled, doubled)


@pytest.mark.parametrize(
    "hooks", [lambda: torch.autograd.graph.saved_tensors_hooks(doubled, doubled), OwnHooks]
)
def test_saved_tensors_that_are_changed(hooks: Callable[[], Any]) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            with hooks():
                return self.second(self.first(x).sin())

    refused(Trap(), "saved_tensors_hooks of its own")


def test_saved_tensors_that_are_kept_elsewhere() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return self.second(self.first(x).sin())

    assert called(exact(Trap(), X).graph) == ["first", "sin", "second"]


def test_capturing_without_gradients() -> None:
    """Every stage trains, and the model's own `no_grad` regions are recorded."""

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            x = self.second(x)
            with torch.no_grad():
                constant = self.first(x).exp()
            return self.first(x) * constant

    torch.manual_seed(0)
    model = nn.Sequential(Trap(), Trap(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    target = Target(model, CALL, sum_of_squares)
    with torch.no_grad():
        pipeline = pipecompile(
            model, CALL, 4, loss_fn=sum_of_squares, costs="flops", microbatches=2
        )
    loss = pipeline.step(CALL, None)
    reference = reference_for(target, pipeline.plan)
    assert torch.equal(loss, reference.step(target, 2))
    expected = dict(reference.model.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name].grad)
    assert len(list(pipeline.parameters())) == 12
