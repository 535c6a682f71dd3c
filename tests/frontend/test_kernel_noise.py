"""Captures on GPUs whose kernels add in another order in each run, played on a CPU."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import CaptureError
from pipecompile.frontend import in_flight_check, self_check
from pipecompile.frontend.deterministic_kernels import deterministic_kernels
from pipecompile.frontend.kernel_noise import is_within_noise
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments

CALL = Arguments((torch.ones(4, 3),), {})


class _Noise(torch.autograd.Function):
    """The identity, whose gradient differs by about `size` in each run."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, size: float) -> Tensor:
        ctx.size = size
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        draws = torch.tensor(list(os.urandom(gradient.numel()))).view_as(gradient)
        return gradient * (1 + ctx.size * draws / 255), None


class Noisy(nn.Module):
    """A layer before kernels that are not deterministic."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(3, 3), size

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Noise.apply(self.layer(x), self.size)
        return result


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in (self_check, in_flight_check):
        monkeypatch.setattr(check, "cuda_devices", lambda model: [0])


@pytest.mark.usefixtures("on_gpu")
def test_rounding_of_a_gpu_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        proven_capture(Noisy(1e-6), CALL)
    assert "gradients of two steps of the model itself differ" in caplog.text


def test_on_a_cpu_it_is_one() -> None:
    with pytest.raises(CaptureError, match="two steps of the model itself differ"):
        proven_capture(Noisy(1e-6), CALL)


@pytest.mark.usefixtures("on_gpu")
def test_what_is_no_rounding_is_a_difference() -> None:
    with pytest.raises(CaptureError, match="two steps of the model itself differ"):
        proven_capture(Noisy(0.5), CALL)


FIRST = {"a": torch.tensor([1.0, 2.0, 100.0]), "b": torch.zeros(2)}
SECOND = {"a": torch.tensor([1.0, 2.0, 100.001]), "b": torch.zeros(2)}


@pytest.mark.parametrize(
    ("found", "is_within"),
    [
        ({"a": torch.tensor([1.0, 2.0, 100.002]), "b": torch.zeros(2)}, True),
        ({"a": torch.tensor([1.0, 2.0, 100.1]), "b": torch.zeros(2)}, False),
        ({"a": torch.tensor([1.0, 2.0, torch.nan]), "b": torch.zeros(2)}, False),
        ({"a": torch.tensor([1.0, 2.0, torch.inf]), "b": torch.zeros(2)}, False),
        ({"a": FIRST["a"], "b": torch.tensor([0.0, 1e-9])}, False),
        ({"a": FIRST["a"].double(), "b": torch.zeros(2)}, False),
        ({"a": FIRST["a"]}, False),
        (FIRST | {"c": torch.zeros(1)}, False),
    ],
)
def test_a_graph_is_as_near_as_steps_are(found: dict[str, Tensor], is_within: bool) -> None:
    assert is_within_noise([FIRST, SECOND, FIRST], found) == is_within


def test_equal_steps_have_no_noise() -> None:
    assert not is_within_noise([FIRST, FIRST, FIRST], SECOND)


def test_numbers_that_are_none_are_equal() -> None:
    one, other = ({"a": each["a"], "b": torch.full((2,), torch.nan)} for each in (FIRST, SECOND))
    assert is_within_noise([one, other, one], one)


def test_deterministic_kernels_are_asked_for_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(record=True) as seen, deterministic_kernels():
        warnings.simplefilter("always")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.empty(1 << 16).isnan().all()
    assert not seen
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fills


def test_what_the_user_asks_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.use_deterministic_algorithms(True)
    try:
        with deterministic_kernels():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
