"""Models with side effects of every kind train the same wherever they are cut, in one process."""

from __future__ import annotations

import pytest
import torch
from stages import assert_equal, case_of
from torch import Tensor, nn
from zoo import first
from zoo.models import MODELS

from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target

# Model of the zoo → how many runs of nodes it has at least, between which it may be cut.
CUT = {
    "data_branch": 20,
    "custom_function": 20,
    "checkpointed": 20,
    "autocast": 20,
    "no_grad": 25,
    "in_place": 1,
    "buffers": 4,
    "attributes": 20,
    "hooks": 20,
    "nested": 20,
    "dispatch_moe": 20,
    "parametrized": 8,
}


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("name", CUT)
def test_cut_at_every_legal_place(name: str) -> None:
    target = Target.of(MODELS[name](), name)
    target.model.train()
    made = case_of(target.model, first(4, target.call))
    assert len(made.units) >= CUT[name]
    for cut in range(1, len(made.units)):
        assert_equal(made, [cut])
    assert_equal(made, range(1, len(made.units)))


class Skipping(nn.Module):
    """Asks for data, and lies once under no_grad and once under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 100 else self.linear(x)


class Regions(nn.Module):
    """One module that asks for data, called in two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Skipping(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lesson = self.part(self.part(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.head(self.part(x + lesson))
        return y.float().sin()


class Exchanged(nn.Module):
    """Two buffers change places, and one is replaced twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("left", torch.ones(8))
        self.register_buffer("right", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x) + self.left
        self.left, self.right = self.right, self.left + hidden.detach().mean(0)
        out = self.head(hidden.sin()) * self.right
        self.right = self.right * 2
        return torch.relu(out.cos()) + self.left


class LateHooks(nn.Module):
    """Hooks on tensors that other layers have read by then."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        second = first.sin()
        out = self.head(second)
        first.register_hook(lambda gradient: gradient * 2)
        second.register_hook(lambda gradient: gradient * 3)
        return (out + first).cos().exp()


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", [Regions, Exchanged, LateHooks])
def test_effects_together_cut_at_every_legal_place(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made = case_of(kind(), Arguments((torch.randn(4, 8),), {}))
    assert len(made.units) > 1
    for cut in range(1, len(made.units)):
        assert_equal(made, [cut])
    assert_equal(made, range(1, len(made.units)))
