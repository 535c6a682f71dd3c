"""Repairs of torch: what fake tensors become where torch's own rules are wrong in some releases."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile import pipecompile
from pipecompile.graph.torch_repairs import repair_torch


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("both_ways", [False, True])
def test_states_of_recurrent_layers_have_their_shapes(
    kind: type[nn.RNNBase], layers: int, batch: int, both_ways: bool
) -> None:
    """Torch 2.11 has one dimension too many for an LSTM whose input carries a gradient."""
    repair_torch()
    layer, x = kind(4, 6, layers, bidirectional=both_ways), torch.randn(5, batch, 4)
    real, real_states = layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher():
        for fake in (mode.from_tensor(x), mode.from_tensor(x).requires_grad_()):
            made, states = layer(fake)
            assert made.shape == real.shape
            for state, wanted in zip(_listed(states), _listed(real_states), strict=True):
                assert state.shape == wanted.shape


def test_a_parameter_may_have_the_name_of_the_module_in_its_methods() -> None:
    """Its generated forward would otherwise read it into `self`."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("self", nn.Parameter(torch.full((4,), 2.0)))
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.second(self.first(value) * self.get_parameter("self"))
            return scaled

    model, x = Scaled(), torch.randn(4, 4)
    pipe = pipecompile(model, x, k=2, microbatches=1, loss_fn=lambda y, _: y.sum(), costs="flops")
    pipe.step(x)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for found, each in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(found.grad, each)  # type: ignore[arg-type]


def _listed(states: object) -> list[torch.Tensor]:
    return [*states] if isinstance(states, tuple) else [states]  # type: ignore[list-item]
