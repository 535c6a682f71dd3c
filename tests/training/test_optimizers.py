"""Optimizers that a pipeline is trained with, against the unsplit model in a plain loop."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pipecompile import pipecompile
from tests.sm3 import SM3

WIDTHS = (8, 20, 28, 36, 8)
OPTIMIZERS = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "sm3": lambda parameters: SM3(parameters, lr=0.05),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(WIDTHS))).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_factored_state_train_the_unsplit_model(name: str) -> None:
    """A stage has whole parameters, so means and maxima over rows and columns are the same."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)) for _ in range(20)
    ]
    unsplit = model()
    optimizer = OPTIMIZERS[name](list(unsplit.parameters()))
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(unsplit(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    pipeline = pipecompile(
        model(),
        batches[0][0],
        k=4,
        microbatches=4,
        loss_fn=loss_of,
        optimizer=name,
        costs="flops",
        self_check=False,
    )
    own = [loss.item() for loss in pipeline.train(batches, OPTIMIZERS[name])]
    assert own == pytest.approx(losses, rel=1e-12)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-2)
    for left, right in zip(pipeline.parameters(), unsplit.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-12)
    # Much less than a copy of the parameters, and what the plan says.
    held = [slot for each in pipeline._training.optimizers for slot in _slots(each)]
    planned = sum(memory.optimizer.expected for memory in pipeline.plan.prediction.memory)
    assert sum(slot.nbytes for slot in held) == planned
    assert planned < sum(p.nbytes for p in pipeline.parameters()) / 4


def _slots(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state.values()
    return [slot for state in states for slot in state.values() if isinstance(slot, Tensor)]
