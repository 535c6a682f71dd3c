"""Tensors that a loss reaches are as they were after a block that calls it, also their memory and
gradients; and what cannot be noted or put back is no reason to fail.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import mean_square
from torch import Tensor, nn

from pipecompile import pipecompile
from pipecompile.frontend import callable_state
from pipecompile.frontend.callable_state import callable_restored

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Change = Callable[[Tensor], object]


def weight() -> Tensor:
    return torch.ones(2, requires_grad=True)


def weight_with_gradient() -> Tensor:
    tensor = weight()
    tensor.sum().backward()
    return tensor


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def filled(tensor: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.fill_(2)


def resized(tensor: Tensor) -> None:
    tensor.resize_(3).fill_(2)


def replaced(tensor: Tensor) -> None:
    tensor.data = torch.zeros(5)


def told(tensor: Tensor) -> object:
    gradient = tensor.grad.tolist() if tensor.is_leaf and tensor.grad is not None else None
    return tensor.tolist(), tensor.requires_grad, tensor.is_leaf, gradient


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (inferred, filled),
        (weight, filled),
        (weight, replaced),
        (weight, lambda tensor: tensor.sum().backward()),
        (weight_with_gradient, lambda tensor: tensor.sum().backward()),
        (weight, lambda tensor: tensor.requires_grad_(False)),
        (lambda: torch.ones(2), lambda tensor: tensor.requires_grad_()),
        (lambda: torch.ones(2), lambda tensor: tensor.mul_(weight())),
        (lambda: torch.ones(2), resized),
        (lambda: torch.ones(2), replaced),
    ],
)
def test_a_tensor_is_put_back(make: Callable[[], Tensor], change: Change) -> None:
    tensor = make()
    before, address = told(tensor), tensor.data_ptr()
    with callable_restored(lambda: tensor):
        change(tensor)
        assert told(tensor) != before
    assert told(tensor) == before
    assert change is resized or tensor.data_ptr() == address


def test_parameters_of_a_large_model_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are put aside all the same."""
    teacher = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    monkeypatch.setattr(callable_state, "MOST_BYTES", 300)
    with callable_restored(lambda: teacher):
        teacher(X).sum().backward()
        for parameter in teacher.parameters():
            filled(parameter)
    first, second = teacher.parameters()
    assert first.ne(2).all()
    assert second.eq(2).all()
    assert first.grad is second.grad is None


def test_no_more_is_copied_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is nearest to the callable is, however many tensors and arrays it reaches."""
    near: list[Any] = [torch.zeros(8), np.zeros(8)]
    far = [torch.zeros(8) for _ in range(4)]
    monkeypatch.setattr(callable_state, "MOST_BYTES", 100)
    with callable_restored(near, lambda: far):
        for each in (*near, *far):
            each += 1
    assert not near[0].any() and not near[1].any()
    assert all(each.eq(1).all() for each in far)


def sparse() -> Any:
    return torch.eye(8).to_sparse()


def of_rows() -> Any:
    return torch.eye(8).to_sparse_csr()


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantised() -> Any:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def of_lazy_module() -> Any:
    return nn.LazyLinear(8)


def with_sparse_buffer() -> Any:
    module = nn.Module()
    module.register_buffer("graph", sparse())
    return module


def read_only() -> Any:
    array = np.zeros(2)
    array.setflags(write=False)
    return array


def dead() -> Any:
    class Owner:
        pass

    return weakref.proxy(Owner())


class Unready:
    """An object that is a proxy of nothing yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("it works later")


class Constant(type):
    """Classes whose attributes nobody may set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{name} is constant")


ODD = [
    *(sparse, of_rows, nested, quantised, of_lazy_module, with_sparse_buffer, read_only, dead),
    *(Unready, random.SystemRandom),
]


@pytest.mark.parametrize("make", ODD)
def test_a_loss_may_reach_what_cannot_be_copied(make: Callable[[], Any]) -> None:
    value, calls = make(), [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        return mean_square(output, target) * (type(value) is not int)

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = pipecompile(model, X, k=2, microbatches=2, loss_fn=loss, costs="flops")
    assert calls == [0]
    pipe.step(X, X)


def test_what_cannot_be_put_back_keeps_nothing_else_from_it() -> None:
    storage, calls = torch.zeros(1), [0]
    expanded = storage.expand(4)

    def loss() -> object:
        storage.add_(1)
        calls[0] += 1
        return expanded

    with callable_restored(loss, lambda: calls):
        loss()
    assert calls == [0]
    assert not storage


def test_attributes_of_a_class_that_refuses_to_set_them_are_put_back() -> None:
    class Counted(metaclass=Constant):
        calls = 0

        def __call__(self) -> None:
            type.__setattr__(Counted, "calls", Counted.calls + 1)

    counted = Counted()
    with callable_restored(counted):
        counted()
    assert Counted.calls == 0


def test_a_lazy_module_stays_what_its_first_call_makes_it() -> None:
    module = nn.LazyLinear(8)
    with callable_restored(lambda: module):
        module(X)
    assert module(X).shape == (4, 8)
