"""A forward that catches what a capture raises: the path that it then takes is not recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments

Act = Callable[[Tensor], Tensor]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def caught(read: Callable[[Tensor], float], kind: type[BaseException] = Exception) -> Act:
    def scaled(value: Tensor) -> Tensor:
        try:
            return value * read(value.detach())
        except kind:
            return value * 3.0

    return scaled


def suppressed(value: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        value = value * value.detach().mean().item()
    return value


def returned(value: Tensor) -> Tensor:
    scale = 1.0
    try:
        scale = value.detach().mean().item()
    finally:
        return value * scale  # noqa: B012


def is_broken(value: Tensor) -> bool:
    try:
        return bool(torch.isnan(value).any())
    except Exception:
        return False


READS: dict[str, Act] = {
    "item": caught(lambda value: value.mean().item()),
    "a branch": caught(lambda value: 2.0 if value.mean() > 0 else 1.0),
    "numpy": caught(lambda value: float(value.numpy().mean())),
    "an array": caught(lambda value: float(np.asarray(value).mean())),
    "a list": caught(lambda value: max(value.flatten().tolist())),
    "a shape": caught(lambda value: 1.0 + len(value.nonzero())),
    "an index": caught(lambda value: [1.0, 2.0][int(value.mean() > 0)]),
    "as torch's error": caught(lambda value: value.mean().item(), RuntimeError),
    "as any error": caught(lambda value: value.mean().item(), BaseException),
    "suppressed": suppressed,
    "lost in a return": returned,
    "in a function": lambda value: value * 0 if is_broken(value) else value,
}


class Scaled(nn.Module):
    """Two layers, between which the hidden values are given to `act`."""

    def __init__(self, act: Act | nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(8, 8), nn.Linear(8, 8), act

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, 8) to the same shape."""
        return self.two(self.act(self.one(value)))


class Part(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def forward(self, value: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return self.act(value)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", READS)
def test_a_model_that_catches_an_error_of_the_capture_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"test_caught_errors.py:\d+"):
        capture(Scaled(READS[name]), Arguments((X,), {}))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", READS)
def test_a_module_that_catches_one_is_one_node(name: str) -> None:
    call = Arguments((X,), {})
    captured = capture(Scaled(Part(READS[name])), call)
    assert "act asks for the values of tensors" in str(captured.notes[0])
    check_capture(captured, captured.instantiate(call), call)


def test_an_error_that_the_model_raises_itself_may_be_caught() -> None:
    def flattened(value: Tensor) -> Tensor:
        try:
            return value.t().view(-1).view_as(value)
        except (RuntimeError, ValueError):  # fakes raise the other one
            return value.flatten().view_as(value)

    assert capture(Scaled(flattened), Arguments((X,), {})).method == "recorded"
