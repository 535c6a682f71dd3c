from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.runtime.gradients import divide_gradients, fresh_gradients


def parameter(gradient: float | None) -> Tensor:
    made = torch.zeros(2, requires_grad=True)
    made.grad = None if gradient is None else torch.full((2,), gradient)
    return made


def test_a_step_adds_to_what_was_there_and_only_its_own_part_is_divided() -> None:
    old, new, *_ = parameters = parameter(3.0), parameter(None), parameter(5.0), parameter(None)
    with fresh_gradients(parameters):
        assert all(p.grad is None for p in parameters)
        old.grad, new.grad = torch.full((2,), 8.0), torch.full((2,), 4.0)
        divide_gradients(parameters, 4)
    assert [p.grad if p.grad is None else p.grad.tolist() for p in parameters] == [
        [5, 5],
        [1, 1],
        [5, 5],
        None,
    ]


def test_what_a_user_holds_on_to_is_added_to_in_place() -> None:
    only = parameter(1.0)
    held = only.grad
    with fresh_gradients([only]):
        only.grad = torch.ones(2)
    assert only.grad is held
    assert held is not None
    assert held.tolist() == [2.0, 2.0]


def test_a_sparse_gradient_from_before_is_refused() -> None:
    sparse = parameter(None)
    sparse.grad = torch.ones(2).to_sparse()
    with pytest.raises(InputError, match="sparse gradient from before the step"):
        fresh_gradients([sparse]).__enter__()


def test_a_failing_step_leaves_gradients_as_they_were() -> None:
    parameters = [parameter(3.0), parameter(None)]
    held = parameters[0].grad

    def fail() -> None:
        for each in parameters:
            each.grad = torch.ones(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fresh_gradients(parameters):
        fail()
    assert parameters[0].grad is held
    assert held is not None
    assert held.tolist() == [3.0, 3.0]
    assert parameters[1].grad is None


def test_a_generator_of_parameters_is_read_once() -> None:
    only = parameter(1.0)
    with fresh_gradients(p for p in [only]):
        only.grad = torch.ones(2)
    assert only.grad.tolist() == [2.0, 2.0]
