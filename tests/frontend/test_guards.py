"""A capture knows the batch sizes at which it holds; at others the model is captured again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from zoo import captured, same
from zoo.exact import exact

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.failing_model import ModelFailsError
from pipecompile.frontend.guards import fake_input
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
    index
    for index, text in enumerate(inspect.getsourcelines(Branches)[0])
    if "x.size(0) > 3" in text
)


def call(batch: int) -> Arguments:
    return Arguments((torch.randn(batch, 4),), {})


def test_the_batch_has_the_same_name_in_every_recording() -> None:
    """However many fakes are alive: those of a buffer that is a view may or may not be."""
    names = set[str]()
    for others in range(4):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        alive = [mode.from_tensor(torch.ones(2)) for _ in range(others)]
        names.add(str(fake_input(torch.ones(6, 2), mode, "x", {0}).shape[0]))
        del alive
    assert len(names) == 1


def test_a_violated_guard_is_named_with_its_line() -> None:
    guards = capture(Branches(), call(4)).guards
    assert not guards.is_fixed
    assert guards.violation(100) is None
    reason = guards.violation(2)
    assert reason is not None
    assert "> 3 does not hold" in reason
    assert f"test_guards.py:{LINE}" in reason


@pytest.mark.parametrize("batches", [(4, 2, 1, 7), (2, 4, 1, 3), (1, 4, 2)])
def test_a_model_that_takes_another_branch_is_captured_again(batches: tuple[int, ...]) -> None:
    exact(Branches(), torch.randn(7, 4), batches=batches)


@pytest.mark.parametrize("batch", [4, 5, 100])
def test_a_capture_holds_if_the_branch_is_the_same(batch: int) -> None:
    model = Branches()
    captured_model, _ = captured(model, *call(4).args)
    other = call(batch)
    assert same(captured_model.instantiate(other)(*other.args)[0], model(*other.args))


def test_a_capture_of_several_samples_is_not_for_one() -> None:
    captured_model = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), call(4))
    reason = captured_model.guards.violation(1)
    assert reason is not None
    assert "torch treats batches of 0 and 1 apart" in reason


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 2, 2).flatten(1) + torch.ones(4, 4)


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x)


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[index].sin() * index for index in range(x.shape[0])])


@pytest.mark.parametrize(("kind", "batch"), [(Fixed, 4), (Length, 4), (Loop, 4), (Branches, 1)])
def test_a_graph_for_one_batch_size_has_a_note(kind: type[nn.Module], batch: int) -> None:
    captured_model = capture(kind(), call(batch))
    assert captured_model.guards.is_fixed
    assert captured_model.guards.violation(batch) is None
    assert captured_model.guards.violation(3) is not None
    note = f"the graph is for microbatches of {batch} samples alone"
    assert (note in map(str, captured_model.notes)) == (batch > 1)


@pytest.mark.parametrize("kind", [Length, Loop])
def test_a_model_with_a_fixed_batch_size_is_captured_again_for_others(
    kind: type[nn.Module],
) -> None:
    exact(kind(), torch.randn(7, 4), batches=(4, 1, 7))


def test_a_model_that_cannot_run_at_another_batch_is_refused_there() -> None:
    with pytest.raises(
        ModelFailsError, match=r"test_guards.py:\d+\): the model itself fails on the sample input"
    ):
        capture(Fixed(), call(4)).instantiate(call(2))


class Numbers(nn.Module):
    """Computes with the batch size; numbers are rounded as Python rounds them."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        return (
            x * (batch / 3 * 0.1 * 0.7)
            + (0.1 + batch + 0.2) * batch**-0.5
            + 1.1 * (batch * 0.3 + 0.7)
            - batch // 2
        )


def test_numbers_made_of_the_batch_round_as_pythons() -> None:
    exact(Numbers(), torch.randn(7, 4), batches=(4, 2, 3, 5, 6, 7, 1))


class Told(nn.Module):
    """Returns `tell` of its result and its input."""

    def __init__(self, tell: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tell = tell

    def forward(self, x: Tensor) -> Any:
        return self.tell(self.linear(x), x)


TOLD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a constant": lambda h, x: {"h": h, "batch": len(x)},
    "a choice": lambda h, x: {"h": h, "kind": "large" if x.shape[0] > 3 else "small"},
    "the structure": lambda h, x: (h, h.mean()) if x.shape[0] > 3 else h,
    "as many tensors": lambda h, x: [row * 2 for row in h],
}


@pytest.mark.parametrize("tell", TOLD.values(), ids=TOLD)
def test_a_result_whose_form_depends_on_the_batch_is_refused_at_another(
    tell: Callable[[Tensor, Tensor], Any],
) -> None:
    """The structure of one batch's result would be used for the tensors of another."""
    model = Told(tell)
    captured_model = exact(model, torch.randn(7, 4), batches=(4,))
    with pytest.raises(
        CaptureError,
        match="at batch 2 the model returns another structure, or other constants in it",
    ):
        captured_model.instantiate(call(2))
    exact(model, torch.randn(7, 4), batches=(2,))


@pytest.mark.parametrize("train", [True, False])
def test_a_second_capture_is_in_the_mode_of_the_model(train: bool) -> None:
    class Dropping(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = Dropping().train(train)
    captured_model = exact(model, torch.randn(7, 4), batches=(4, 2, 7, 1))
    other = captured_model.recapture(call(2))
    assert other.training == {"": train, "linear": train}
    assert other.guards.batch == 2
    model.train(not train)
    assert captured_model.recapture(call(4)).training == {"": not train, "linear": not train}
    with pytest.raises(CaptureError, match=f"was captured in {'train' if train else 'eval'} mode"):
        captured_model.instantiate(call(2))
