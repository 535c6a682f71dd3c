"""Answers of data that a run on real tensors recorded are replayed on fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from pipecompile.errors import CaptureError
from pipecompile.graph.data_answers import (
    DataAnswer,
    RecordAnswers,
    is_data_dependent,
    replay_answers,
)

X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]])

DATA_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "branch": lambda x: x.exp() if x.sum() > 0 else x[:1],
    "item": lambda x: torch.ones(int(x.max().item()), 2),
    "float": lambda x: x * float(x[0, 0]),
    "text": lambda x: x * float(f"{x[0, 0]:.1f}"),
    "plain text": lambda x: x * float(f"{x[0, 0]}"),
    "numpy": lambda x: torch.ones(int(x.numpy().max()), 2),
    "array": lambda x: torch.ones(int(np.asarray(x).max()), 2),
    "tolist": lambda x: torch.zeros([int(size) for size in x[1].abs().tolist()]),
    "nonzero": lambda x: x.new_ones(torch.nonzero(x > 0).shape),
    "mask": lambda x: x[x > 0] * 2,
    "unique": lambda x: x.sign().unique(return_counts=True)[1],
    "one hot": lambda x: functional.one_hot((x > 0).long(), 2)[x > 0],
    "equal": lambda x: x if torch.equal(x, x.abs()) else x[0],
    "loop": lambda x: [x := x / 2 for _ in range(9) if x.abs().max() > 1][-1],
}


def with_answers(function: Callable[[Tensor], Any]) -> tuple[Any, list[DataAnswer]]:
    with RecordAnswers() as record:
        return function(X), record.answers


@pytest.mark.parametrize("symbols", [True, False])
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_fake_run_has_the_shapes_of_the_real_one(name: str, symbols: bool) -> None:
    real, answers = with_answers(DATA_DEPENDENT[name])
    assert answers
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbols else None)
    fake = mode.from_tensor(X, static_shapes=True)
    with mode, replay_answers(answers):
        out = DATA_DEPENDENT[name](fake)
    assert len(out.shape) == len(real.shape)
    assert all(bool(left == right) for left, right in zip(out.shape, real.shape, strict=True))
    assert out.dtype == real.dtype


def test_answers_hold_numbers_and_layouts() -> None:
    assert [answer.number for answer in with_answers(DATA_DEPENDENT["item"])[1]] == [6.0]
    (mask,) = with_answers(lambda x: x[x > 0])[1]
    assert mask.number is None
    assert [layout[0] for layout in mask.layouts] == [(4, 1)] or mask.layouts[0][0][0] == 4


def test_an_operator_without_an_answer_is_an_error() -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(X, static_shapes=True)
    with (
        pytest.raises(CaptureError, match="not when the module ran on the sample"),
        mode,
        replay_answers(()),
    ):
        DATA_DEPENDENT["item"](fake)


def test_real_tensors_need_no_answers() -> None:
    with replay_answers(()):
        assert (X.sum() > 0).item() is True
        assert X[X > 0].shape == (4,)


def test_no_answers_change_nothing() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, replay_answers(None):
        assert not isinstance(mode.from_tensor(X, static_shapes=True).max().item(), float)


def test_data_dependent_operators() -> None:
    aten = torch.ops.aten
    assert is_data_dependent(aten._local_scalar_dense.default)
    assert is_data_dependent(aten.nonzero.default)
    assert not is_data_dependent(aten.add.Tensor)
    assert not is_data_dependent(len)
