"""A capture says where it holds, and refuses elsewhere."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from zoo import captured, same

from pipecompile.errors import CaptureError
from pipecompile.frontend.signature import Arguments


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 3:
            return self.linear(x)
        return -self.linear(x)


LINE = inspect.getsourcelines(Branches)[1] + next(
    index for index, text in enumerate(inspect.getsourcelines(Branches)[0]) if "x.size(0) > 3" in text
)


def call(batch: int) -> Arguments:
    return Arguments((torch.randn(batch, 4),), {})


def test_a_branch_on_the_batch_size_is_refused_where_it_goes_the_other_way() -> None:
    found, _ = captured(Branches(), *call(4).args)
    with pytest.raises(CaptureError) as caught:
        found.instantiate(call(2))
    message = str(caught.value)
    assert "at batch 2 the model takes another branch than at 4" in message
    assert "> 3 does not hold" in message
    assert f"test_guards.py:{LINE}" in message
    assert message.endswith("capture it with a batch of 2")


@pytest.mark.parametrize("batch", [4, 5, 100])
def test_it_holds_where_the_branch_goes_the_same_way(batch: int) -> None:
    model = Branches()
    found, _ = captured(model, *call(4).args)
    other = call(batch)
    assert same(found.instantiate(other)(*other.args)[0], model(*other.args))


def test_the_other_branch_can_be_captured() -> None:
    model = Branches()
    found, _ = captured(model, *call(2).args)
    three = call(3)
    assert same(found.instantiate(three)(*three.args)[0], model(*three.args))
    with pytest.raises(CaptureError, match="at batch 4 the model takes another branch than at 2"):
        found.check_batch(4)


def test_a_capture_of_several_samples_is_not_for_one() -> None:
    found, _ = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), *call(4).args)
    with pytest.raises(CaptureError, match=r"at batch 1 .*torch treats batches of 0 and 1 apart"):
        found.check_batch(1)


def test_a_capture_of_one_sample_is_for_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found, module = captured(model, *call(1).args)
    x = torch.randn(1, 4)
    assert same(module(x)[0], model(x))
    with pytest.raises(CaptureError, match="the capture is for batches of 1, not 4; capture it again"):
        found.instantiate(call(4))


def test_a_model_that_fixes_its_batch_is_for_that_batch() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, 2, 2).flatten(1) + torch.ones(4, 4)

    found, _ = captured(Fixed(), *call(4).args)
    with pytest.raises(CaptureError, match="the capture is for batches of 4, not 2"):
        found.instantiate(call(2))


def test_a_model_that_makes_an_int_of_its_batch_is_for_that_batch() -> None:
    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(x)

    found, _ = captured(Length(), *call(4).args)
    with pytest.raises(CaptureError, match="the capture is for batches of 4, not 2"):
        found.instantiate(call(2))
