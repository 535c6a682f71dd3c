"""Torch's global flags: what a forward asks of them, or makes with them, is as it was compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plain_loop import mean_square
from torch import Tensor, nn
from torch import are_deterministic_algorithms_enabled as are_repeatable
from torch import get_float32_matmul_precision as precision
from torch import get_num_threads as count_threads
from torch.backends import cuda as gpu
from torch.backends import cudnn as kernels
from torch.backends.cuda import flash_sdp_enabled

from pipecompile import InputError, pipecompile

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
BACKENDS = torch.backends


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_default_device(None)


class Scaled(nn.Module):
    """Two layers, between which the hidden values are given to `act`."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), act
        self.deterministic = True

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.two(self.act(self.one(value)).float()) * self.deterministic


def pipeline_of(act: Callable[[Tensor], Tensor]) -> Any:
    pipeline = pipecompile(Scaled(act), X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    pipeline.step(X)
    return pipeline


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def set_precision() -> None:
    torch.set_float32_matmul_precision("high")


def without_flash() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


def set_cudnn() -> None:
    torch.backends.cudnn.deterministic = True


ASKED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], None]]] = {
    "are_deterministic": (
        lambda value: value * (1 + torch.are_deterministic_algorithms_enabled()),
        be_deterministic,
    ),
    "get_float32_matmul_precision": (
        lambda value: value.double() if torch.get_float32_matmul_precision() == "high" else value,
        set_precision,
    ),
    "flash_sdp_enabled": (lambda value: value * flash_sdp_enabled(), without_flash),
    "get_num_threads": (
        lambda value: value * torch.get_num_threads(),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ),
    "cudnn.deterministic": (
        lambda value: value.abs() if BACKENDS.cudnn.deterministic else value,
        set_cudnn,
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_step_is_refused_after_a_flag_changed_that_the_forward_asks_for(name: str) -> None:
    act, change = ASKED[name]
    pipeline = pipeline_of(act)
    change()
    with pytest.raises(InputError, match=rf"{name}.* has changed since the model was compiled"):
        pipeline.step(X)
    with pytest.raises(InputError, match=rf"{name}.* has changed since the model was compiled"):
        pipeline.evaluate(X)


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def add_thread() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


TABLE = {"ask": are_repeatable, "kernels": kernels}

ALIASED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], None]]] = {
    "a Python module": (lambda value: value * (1 + kernels.deterministic), set_cudnn),
    "a Python module, and what it has": (
        lambda value: value * (1 + gpu.matmul.allow_tf32),
        allow_tf32,
    ),
    "an object in a default": (
        lambda value, flags=gpu.matmul: value * (1 + flags.allow_tf32),  # type: ignore[misc]
        allow_tf32,
    ),
    "a function": (lambda value: value * (1 + are_repeatable()), be_deterministic),
    "a built-in function": (lambda value: value * count_threads(), add_thread),
    "a function of text": (lambda value: value * len(precision()), set_precision),
    "a function in a table": (lambda value: value * (1 + TABLE["ask"]()), be_deterministic),
    "a Python module in a table": (
        lambda value: value * (1 + TABLE["kernels"].deterministic),
        set_cudnn,
    ),
}


@pytest.mark.parametrize("name", ALIASED)
def test_a_flag_is_asked_for_under_another_name(name: str) -> None:
    act, change = ALIASED[name]
    pipeline = pipeline_of(act)
    change()
    with pytest.raises(InputError, match=r"^torch\..* has changed since the model was compiled"):
        pipeline.step(X)


@pytest.mark.parametrize("name", ASKED)
def test_flags_that_choose_among_kernels_may_change(name: str) -> None:
    pipeline = pipeline_of(torch.tanh)
    ASKED[name][1]()
    pipeline.step(X)


@pytest.mark.parametrize(
    "act",
    [
        lambda value: value + torch.full((WIDTH,), 1 / 3),
        lambda value: value * torch.arange(WIDTH).div(3),
        lambda value: value * (2 if torch.get_default_dtype() is torch.float64 else 1),
    ],
)
def test_the_default_dtype_is_that_of_the_compile(act: Callable[[Tensor], Tensor]) -> None:
    pipeline = pipeline_of(act)
    torch.set_default_dtype(torch.float64)
    with pytest.raises(InputError, match=r"default dtype is torch.float64, but was "):
        pipeline.step(X)
    torch.set_default_dtype(torch.float32)
    pipeline.step(X)


@pytest.mark.parametrize(
    "act",
    [
        lambda value: value + torch.ones(WIDTH),
        lambda value: value * float(torch.arange(3)[2]),
        lambda value: value * (2 if torch.empty(0).device.type == "meta" else 1),
        lambda value: value * (2 if torch.get_default_device().type == "meta" else 1),
    ],
)
@pytest.mark.parametrize("change", [torch.set_default_device, torch.device])
def test_the_default_device_is_that_of_the_compile(
    act: Callable[[Tensor], Tensor], change: Callable[[str], Any]
) -> None:
    pipeline = pipeline_of(act)
    with change("meta") or nullcontext(), pytest.raises(InputError, match="default device is meta"):
        pipeline.step(X)
    torch.set_default_device(None)
    pipeline.step(X)


def test_a_pipeline_may_be_compiled_where_the_default_device_is_named() -> None:
    torch.set_default_device("cpu")
    pipeline = pipeline_of(lambda value: value + torch.ones(WIDTH))
    torch.set_default_device(None)
    pipeline.step(X)
