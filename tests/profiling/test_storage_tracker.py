"""When storages live: by hand, and against the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import allocations, highest
from torch import Tensor, nn

from pipecompile.profiling.storage_tracker import StorageLiveRange, StorageTracker


def no_workspace(*_: Any) -> int:
    return 0


def test_storages_live_until_their_last_holder_lets_go() -> None:
    """A view keeps its base, and what works in place makes nothing."""
    image = torch.randn(16)
    with StorageTracker([image], no_workspace) as tracker:
        doubled = image * 2
        tracker.enter(1)
        view = doubled[:4].add_(1)
        del doubled
        tracker.enter(2)
        short = view + 1
        tracker.enter(3)
        del view
        tracker.enter(4)
    assert tracker.live_ranges == [
        StorageLiveRange(64, born=0, died=3),
        StorageLiveRange(16, born=2),
    ]
    assert tracker.peaks == {0: 64, 1: 0, 2: 16, 3: 0, 4: 0}
    assert tracker.indices([short, image, short]) == (1,)


def test_a_number_before_a_tensor_is_no_gradient() -> None:
    image = torch.randn(16)
    with StorageTracker([image], no_workspace) as tracker:
        added = torch.add(2.0, image, alpha=0.5)
    assert tracker.indices([added]) == (0,)
    assert tracker.peaks == {0: 64}


def test_what_dies_at_once_still_makes_a_tick_rise() -> None:
    image = torch.randn(16)
    with StorageTracker([image], no_workspace) as tracker:
        result = (image + 1) * 2
        tracker.enter(1)
        del result
    assert tracker.peaks[0] == 128
    assert [life.died for life in tracker.live_ranges] == [0, 1]


def test_a_saved_tensor_lives_until_the_backward() -> None:
    image = torch.randn(16, requires_grad=True)
    with StorageTracker([image], no_workspace) as tracker:
        value = image.exp()  # saves its result
        total = value.sum()
        del value
        tracker.enter(1)
        total.backward()
        tracker.enter(2)
        image.grad = None
    exponential = tracker.live_ranges[0]
    assert (exponential.bytes, exponential.born, exponential.died) == (64, 0, 1)


def test_gradients_that_meet_are_added_in_place() -> None:
    """`hidden` has three gradients, but two live at a time: the sum and the newest one."""
    image = torch.randn(1024, requires_grad=True)
    scales = torch.ones(3).unbind()  # no numbers: torch wraps them into tensors unseen

    def step() -> None:
        hidden = image * scales[0]
        total = hidden.sum() + (hidden * scales[1]).sum() + (hidden * scales[2]).sum()
        del hidden
        total.backward()

    with StorageTracker([image, *scales], no_workspace) as tracker:
        step()
    image.grad = None
    assert tracker.peaks[0] == highest(allocations(step))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.narrow(nn.functional.gelu(self.wide(self.norm(value))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        query, key, given = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(value).chunk(3, -1)
        )
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        return value + self.out((scores @ given).transpose(1, 2).flatten(2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)),
    "in place": lambda: nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 8), nn.Sigmoid()
    ),
    "residual": lambda: nn.Sequential(Residual(), Residual(), nn.Linear(32, 8)),
    "attention": lambda: nn.Sequential(Attention(), Residual(), nn.Linear(32, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_highest_sum_of_a_step_is_that_of_the_allocator(name: str) -> None:
    """Forward and backward of a real model; gradients of parameters stay."""
    torch.manual_seed(0)
    model, image = MODELS[name](), torch.randn(16, 24, 32)

    def step() -> None:
        model(image).square().mean().backward()

    step()  # once, so that nothing is made for the first time only
    for parameter in model.parameters():
        parameter.grad = None
    with StorageTracker([*model.parameters(), image], no_workspace) as tracker:
        step()
    for parameter in model.parameters():
        parameter.grad = None
    assert tracker.peaks[0] == highest(allocations(step))
