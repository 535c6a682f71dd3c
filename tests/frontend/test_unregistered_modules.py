"""Modules that a forward calls and the model does not register: what they do counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.frontend.outside_values import OutsideValues

DROPOUT = nn.Dropout(1.0)
NORMS = {"first": nn.BatchNorm1d(2), "second": nn.LayerNorm(2)}


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), 0

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 2) to the same shape."""
        return self.body(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teachers = [Teacher()]

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 2) to the same shape."""
        return DROPOUT(self.teachers[0](x)) + NORMS["first"](x)  # type: ignore[no-any-return]


def reloaded(model: Any) -> None:
    state = {name: value * 3 for name, value in model.teachers[0].state_dict().items()}
    model.teachers[0].load_state_dict(state, assign=True)


def extended(model: Any) -> None:
    model.teachers[0].body.append(nn.ReLU())


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a mode": (lambda m: DROPOUT.eval(), "DROPOUT.training"),
    "a setting": (lambda m: setattr(DROPOUT, "p", 0.5), "DROPOUT.p"),
    "one in a table": (lambda m: setattr(NORMS["second"], "eps", 1.0), "NORMS.eps"),
    "a teacher's mode": (lambda m: m.teachers[0].eval(), "teachers.training"),
    "a mode of a part": (lambda m: m.teachers[0].body[1].eval(), "teachers.body.1.training"),
    "other parameters": (reloaded, "teachers.body.0._parameters"),
    "another buffer": (
        lambda m: setattr(NORMS["first"], "running_mean", torch.ones(2)),
        "NORMS._buffers",
    ),
    "a hook": (
        lambda m: m.teachers[0].body.register_forward_hook(lambda *_: None),
        "teachers.body._forward_hooks",
    ),
    "one more module": (extended, "teachers.body._modules"),
}


@pytest.fixture(autouse=True)
def _as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {"first": nn.BatchNorm1d(2), "second": nn.LayerNorm(2)}
    for name, value in (("DROPOUT", nn.Dropout(1.0)), ("NORMS", norms)):
        monkeypatch.setitem(globals(), name, value)


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_found(case: str) -> None:
    change, place = CHANGES[case]
    model = Model()
    values = OutsideValues(model)
    assert values.changed() is None
    change(model)
    changed = values.changed()
    assert changed is not None
    assert changed.endswith(place)


def test_values_of_tensors_and_what_no_code_reads_may_change() -> None:
    model = Model()
    values = OutsideValues(model)
    with torch.no_grad():
        model.teachers[0].body[0].weight.add_(1)
    model(torch.ones(3, 2))
    model.teachers[0].steps = 1
    model.teachers[0].body[1].p = 0.5 + 0.0
    assert values.changed() is None
