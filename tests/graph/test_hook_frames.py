"""Which forward hook runs now is known by its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.graph.hook_frames import hook_codes_of, running_hook

X = torch.zeros(2, 2)
RUNNING: list[str] = []
MODEL = nn.Sequential(nn.Linear(2, 2))


def note(*_: Any) -> None:
    RUNNING.append(running_hook(hook_codes_of(MODEL)))


@torch.no_grad()
def decorated(*_: Any) -> None:
    note()


def tagged(tag: str, *_: Any) -> None:
    note()


class Noting:
    def __call__(self, *_: Any) -> None:
        note()

    def method(self, *_: Any) -> None:
        note()


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (note, "note"),
        (lambda *_: note(), "<lambda>"),
        (decorated, "decorated"),
        (partial(tagged, "first"), "tagged"),
        (Noting(), "Noting"),
        (Noting().method, "Noting.method"),
    ],
)
def test_a_hook_is_known_while_it_runs(hook: Callable[..., Any], name: str) -> None:
    RUNNING.clear()
    handle = MODEL[0].register_forward_hook(hook)
    MODEL(X)
    handle.remove()
    note()
    assert [name, ""] == RUNNING


def test_a_hook_without_code_is_no_hook_that_runs() -> None:
    kept: list[Tensor] = []
    handle = MODEL[0].register_forward_pre_hook(kept.__contains__)  # type: ignore[arg-type]
    assert not hook_codes_of(MODEL)
    handle.remove()
