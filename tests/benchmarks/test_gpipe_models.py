"""The models have the sizes that the GPipe paper gives in its table 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.amoebanet import AmoebaNet
from benchmarks.gpipe_models import Transformer


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("layers", "published"), [(3, 282.2e6), (13, 785.8e6), (103, 5.3e9)])
def test_transformer(layers: int, published: float) -> None:
    with torch.device("meta"):
        assert parameters(Transformer(layers)) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("cells", "filters", "published"), [(18, 208, 82e6), (18, 416, 318e6), (36, 544, 1.05e9)]
)
def test_amoebanet(cells: int, filters: int, published: float) -> None:
    with torch.device("meta"):
        assert parameters(AmoebaNet(cells, filters)) == pytest.approx(published, rel=0.01)


def test_a_step_of_a_small_amoebanet_reaches_every_parameter() -> None:
    model = AmoebaNet(3, 16, classes=4)
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
