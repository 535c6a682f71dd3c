"""What optimizers hold, against those of torch.optim and the allocator's events while they step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from allocations import allocations, highest
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.ir.graph import Parameter
from pipecompile.memory_model.optimizer import OPTIMIZERS, optimizer_bytes
from tests.sm3 import SM3

SHAPES = ((), (7,), (64,), (16, 40), (3, 5, 2), (8, 4, 3, 3), (1, 9))
REAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sm3": SM3,
}
SCALARS = 64  # bytes: numbers that torch wraps into tensors while it steps


def parameters_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def as_costed(parameters: Sequence[nn.Parameter]) -> list[Parameter]:
    return [
        Parameter(
            name=f"p{index}",
            bytes=value.numel() * value.element_size(),
            trainable=True,
            shape=tuple(value.shape),
        )
        for index, value in enumerate(parameters)
    ]


def test_every_optimizer_is_tested() -> None:
    assert REAL.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REAL)
def test_the_state_is_that_of_a_real_optimizer(name: str, dtype: torch.dtype) -> None:
    parameters = parameters_of(SHAPES, dtype)
    optimizer = REAL[name](parameters)
    optimizer.step()
    held = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    real = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held}
    state, _ = optimizer_bytes(as_costed(parameters), name, master_weights=False, lists=False)
    assert sum(state) == sum(real.values())


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The matrix product of Adafactor takes workspace of its kernel in bfloat16.
    [
        *((name, torch.float32) for name in REAL),
        *((name, torch.bfloat16) for name in REAL if name != "adafactor"),
    ],
)
def test_a_step_takes_the_workspace_that_is_said(name: str, dtype: torch.dtype) -> None:
    parameters = parameters_of([(128, 96), (300, 200), (77,), (16, 8, 3, 3)], dtype)
    optimizer = REAL[name](parameters)
    optimizer.step()
    _, workspace = optimizer_bytes(as_costed(parameters), name, master_weights=False, lists=False)
    assert workspace <= highest(allocations(optimizer.step)) <= workspace + SCALARS


@pytest.mark.parametrize("name", REAL)
def test_a_step_over_lists_takes_no_more_than_is_said(name: str) -> None:
    parameters = parameters_of([(128, 96), (300, 200), (77,), (16, 8, 3, 3)], torch.float32)
    optimizer = REAL[name](parameters)
    for group in optimizer.param_groups:
        group["foreach"] = True
    optimizer.step()
    _, workspace = optimizer_bytes(as_costed(parameters), name, master_weights=False, lists=True)
    assert highest(allocations(optimizer.step)) <= workspace + SCALARS


def test_rmsprop_makes_twelve_bytes_of_each_parameter() -> None:
    """GPipe (Huang et al. 2019, table 1): parameter, gradient and mean of squares, 4 bytes each."""
    parameter = Parameter(name="w", bytes=4000, trainable=True, shape=(100, 10))
    state, _ = optimizer_bytes([parameter], "rmsprop", master_weights=False, lists=False)
    assert state == (4000, 4)  # and the counter of steps
    assert parameter.bytes + parameter.bytes + state[0] == 12 * 1000


def test_master_weights_are_float32_copies_which_the_optimizer_works_on() -> None:
    half = Parameter(name="half", bytes=60, trainable=True, shape=(10, 3))
    full = Parameter(name="full", bytes=120, trainable=True, shape=(10, 3))
    state, workspace = optimizer_bytes([half, full], "adam", master_weights=True, lists=False)
    assert sorted(state) == sorted([120, 240, 4, 240, 4])
    assert workspace == 3 * 120, "two temporaries, and the gradient in float32"
    assert optimizer_bytes([half], "sgd", master_weights=True, lists=False) == ((120,), 120)


def test_nothing_is_counted_unless_an_optimizer_is_named() -> None:
    parameter = Parameter(name="w", bytes=4000, trainable=True)
    assert optimizer_bytes([parameter], None, master_weights=False, lists=False) == ((), 0)
    assert optimizer_bytes([], "adamw", master_weights=True, lists=True) == ((), 0)


def test_a_parameter_whose_shape_is_not_known_is_one_of_float32() -> None:
    parameter = Parameter(name="w", bytes=4000, trainable=True)
    state, _ = optimizer_bytes([parameter], "adam", master_weights=True, lists=False)
    assert state == (8000, 4)


def test_what_is_not_known_is_refused_with_what_is() -> None:
    with pytest.raises(
        InputError, match=r"unknown optimizer 'lion'; choose from sgd, momentum, .*adafactor"
    ):
        optimizer_bytes([], "lion", master_weights=False, lists=False)
