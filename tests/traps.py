"""A model with two layers, and a check that a model is refused, for the tests of traps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments

WIDTH = 8


X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))


CALL = Arguments((X[:4].clone(),), {})


class Two(nn.Module):
    """Two layers; a subclass adds the trap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def refused(model: nn.Module, *words: str) -> None:
    """Assert that `model` is refused in one line that holds these words."""
    with pytest.raises(CaptureError) as caught:
        capture(model, CALL).instantiate(CALL)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
