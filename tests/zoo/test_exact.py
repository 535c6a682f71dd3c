"""Every model of the zoo is captured exactly, in both modes and at every batch size, or refused for a stated reason."""

from __future__ import annotations

import pytest

from pipecompile.api.target import Target
from pipecompile.errors import CaptureError
from zoo.judge import by_pipecompile, verdict
from zoo.models import MODELS

REFUSED: dict[str, str] = {}  # model → what the error says


@pytest.mark.parametrize("name", MODELS)
def test_the_capture_is_the_model(name: str) -> None:
    target = Target.of(MODELS[name](), name)
    if name in REFUSED:
        with pytest.raises(CaptureError, match=REFUSED[name]):
            verdict(by_pipecompile, target)
    else:
        assert verdict(by_pipecompile, target) == {}


def test_hardly_any_model_is_refused() -> None:
    assert len(MODELS) >= 30
    assert len(REFUSED) <= len(MODELS) / 30
