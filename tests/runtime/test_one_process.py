"""One process performs the actions in any sound order, with the same result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipecompile.ir.schedule import Action
from pipecompile.runtime.one_process import evaluate, step
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.stage import EagerStage

ORDERS = {
    "one by one": "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1",
    "gpipe": "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
    "recompute": "0F0 0F1 1F0 1B0 1F1 0R0 0B0 1B1 0R1 0B1",
    "split": "0F0 0F1 1F0 1I0 1F1 1I1 0B0 1W0 0I1 0W1 1W1",
}


class One(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x).tanh(),)


def model() -> list[One]:
    torch.manual_seed(0)
    return [One(4, 4), One(4, 4)]


def stages(layers: list[One]) -> list[EagerStage]:
    return [
        EagerStage(layers[0], gradient_inputs=(False,)),
        EagerStage(
            layers[1],
            gradient_inputs=(True,),
            loss=lambda outputs, target: (outputs[0] - target).square().sum(),
        ),
    ]


ROWS = [[torch.randn(3, 4)], [torch.randn(3, 4)]]
TARGETS = [torch.randn(3, 4), torch.randn(3, 4)]


@pytest.mark.parametrize("name", ORDERS)
def test_every_sound_order_gives_the_same_losses_and_gradients(name: str) -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    order = [Action.parse(text) for text in ORDERS[name].split()]
    losses = [
        loss for (loss,) in step(stages(layers), order, Minibatch(ROWS, TARGETS, 0, 0)).values
    ]
    for (x,), target, loss in zip(ROWS, TARGETS, losses, strict=True):
        wanted = (plain[1](plain[0](x)[0])[0] - target).square().sum()
        wanted.backward()
        assert torch.equal(loss, wanted.detach())
    for got, expected in zip(layers, plain, strict=True):
        assert torch.equal(got.weight.grad, expected.weight.grad)


def test_evaluation_is_a_forward_of_each_microbatch() -> None:
    layers = model()
    stages_without_loss = [EagerStage(layer, gradient_inputs=(True,)) for layer in layers]
    batch = Minibatch(ROWS, [None] * len(ROWS), 0, 0)
    found = evaluate(stages_without_loss, batch).values
    assert [values[0].requires_grad for values in found] == [False, False]
    assert all(
        torch.equal(values[0], layers[1](layers[0](row[0])[0])[0])
        for values, row in zip(found, ROWS, strict=True)
    )


def test_an_action_that_is_not_work_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="0SEND_F0 is not a compute action"):
        step(stages(model()), [Action.parse("0SEND_F0")], Minibatch(ROWS[:1], TARGETS[:1], 0, 0))
