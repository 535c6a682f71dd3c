"""Fakes under a tracker have the strides of real results, by which boundaries are sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.graph.side_effects import SideEffectTracker

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 6), (1, 0)),
        ((2, 8, 6), (0, 2, 1)),
        ((2, 8, 6, 5), (0, 2, 3, 1)),
        ((2, 8, 6, 5), (0, 3, 1, 2)),
        ((2, 8, 1, 1), (0, 1, 2, 3)),
        ((2, 8, 6, 5, 3), (0, 4, 1, 2, 3)),
        ((2, 8, 6, 5, 3), (0, 2, 1, 3, 4)),
    ],
)
def test_batch_norm(shape: tuple[int, ...], order: tuple[int, ...], train: bool) -> None:
    x = torch.randn(shape).permute(order)
    norm = NORMS[x.dim()](x.shape[1]).train(train)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, SideEffectTracker():
        fake = norm(mode.from_tensor(x))
    assert fake.stride() == norm(x).stride()
