"""A test plants each known trap of capturing, and shows that it is caught: made right, or refused with its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from stages import assert_equal, case_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import called
from zoo.exact import exact

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments

WIDTH = 8
X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
CALL = Arguments((X[:4].clone(),), {})


class Two(nn.Module):
    """Two layers; a subclass plants the trap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def refused(model: nn.Module, *words: str) -> None:
    """The capture of `model` is refused in one line with these words."""
    with pytest.raises(CaptureError) as caught:
        capture(model, CALL).instantiate(CALL)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_guard_on_the_batch_size() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.shape[0] > 3 else self.second(x)

    found = exact(Trap(), X, batches=(4, 7, 2, 1))
    assert found.guards.broken(2)
    assert not found.guards.broken(7)


def test_branch_on_data() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.mean() > 0 else self.second(x)

    refused(Trap(), "branches on the values of a tensor", "test_traps.py:")
    model = nn.Sequential(Trap(), nn.Linear(WIDTH, WIDTH))
    module = capture(model, CALL).instantiate(CALL)
    for x in (X[:4] + 5, X[:4] - 5):
        assert torch.equal(module(x)[0], model(x))


def test_lost_update_of_a_buffer_that_nobody_reads() -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(len(x))
            return self.first(x)

    exact(Trap(), X)


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


@pytest.mark.parametrize("train", [True, False])
def test_baked_dropout_flag(train: bool) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.first(x), 0.5, self.training)

    model = Trap().train(train)
    found = exact(model, X)
    model.train(not train)
    with pytest.raises(CaptureError, match=f"was captured in {'train' if train else 'eval'} mode"):
        found.instantiate(CALL)


def test_baked_flag_of_a_part() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    found = capture(model, CALL)
    model[1].eval()
    with pytest.raises(CaptureError, match="1 was captured in train mode"):
        found.instantiate(CALL)


def test_view_that_a_later_layer_writes_to() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            view = hidden[:, :2]
            other = self.second(x.cos().exp())
            view.mul_(2)
            return (hidden + other).sin().cos()

    exact(Trap(), X)
    torch.manual_seed(0)
    made = case_of(Trap(), CALL)
    places = {name: unit for unit, names in enumerate(made.units) for name in names}
    assert len({places[name] for name in ("first", "getitem", "mul_")}) == 1
    for cut in range(1, len(made.units)):
        assert_equal(made, [cut])


def test_counter_in_an_attribute() -> None:
    class Trap(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.first(x) * self.calls

    model = Trap()
    refused(model, "calls (", "test_traps.py:", "make it a buffer")
    assert model.calls == 0


def test_auxiliary_loss_left_on_an_attribute() -> None:
    class Trap(Two):
        aux: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            self.aux = self.second(hidden).square().mean()
            return hidden

    refused(Trap(), "aux (", "a loss that reads it would not train the model")


@pytest.mark.parametrize("inner", [True, False])
def test_backward_hook_on_a_module_that_is_taken_apart(inner: bool) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    part = Trap()
    part.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    refused(nn.Sequential(nn.Linear(WIDTH, WIDTH), part) if inner else part, "a backward hook is registered")


def test_fake_tensor_left_in_an_lru_cache() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + positions(WIDTH)

    positions.cache_clear()
    exact(Trap(), X)
    assert type(positions(WIDTH)) is Tensor
    exact(Trap(), X)  # and one that is filled is not baked into the graph
    assert "arange" in called(capture(Trap(), CALL).graph)


@lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width).float()


def test_replaced_buffer() -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden, old = self.first(x), self.average
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
            return hidden * self.average + old

    model = Trap()
    own = model.average
    exact(model, X)
    assert model.average is own


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    class Trap(Two):
        def region(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.second(x).sin(), 0.3, self.training)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, self.first(x), use_reentrant=reentrant)

    assert called(exact(Trap(), X).graph) == ["first", "second", "sin", "dropout"]


@pytest.mark.parametrize(
    ("draw", "whose"), [(np.random.rand, "numpy's"), (random.random, "Python's")], ids=["numpy", "python"]
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

    refused(Trap(), "torch.Generator of its own", "test_traps.py:")


def test_tensor_kept_in_a_closure() -> None:
    """Read, it is a constant; written to, it is state that no stage owns."""
    kept = torch.ones(WIDTH)

    class Reads(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * kept

    class Writes(Two):
        def forward(self, x: Tensor) -> Tensor:
            kept.add_(1)
            return self.first(x) * kept

    exact(Reads(), X)
    refused(Writes(), "writes to a tensor attribute in place", "test_traps.py:")


@pytest.mark.parametrize("region", ["no_grad", "autocast"])
def test_region_that_is_cut_in_the_middle(region: str) -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.no_grad() if region == "no_grad" else torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.inner[2](self.inner[1](self.inner[0](x).sin()).cos())
            return self.second(x + y.float())

    exact(Trap(), X)
    torch.manual_seed(0)
    made = case_of(Trap(), CALL)
    inside = [node.name for node in made.capture.graph.nodes if node.meta.get("ambient") is not None]
    assert len({unit for unit, names in enumerate(made.units) if set(names) & set(inside)}) > 3
    for cut in range(1, len(made.units)):
        assert_equal(made, [cut])


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_wrapper_around_the_model(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    from pipecompile.errors import InputError

    with pytest.raises(InputError, match=r"give the module inside it \(\.(module|_orig_mod)\)"):
        capture(wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH))), CALL)
