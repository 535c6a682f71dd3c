"""Draws do not depend on the cut. Those from generators of a model's own are refused, however it
comes by them.
"""

from __future__ import annotations

import importlib
import os
import random
import secrets
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import mean_square
from torch import Tensor, nn
from torch.nn import functional
from traps import WIDTH, Two

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.randomness import require_torch_randomness
from pipecompile.frontend.signature import Arguments
from tests.sweeps import examples

X = torch.ones(4, 6)
PYTHON, NUMPY = random.Random(0), np.random.default_rng(0)


class Scaling(nn.Module):
    """A layer times a number that is drawn from the module's generators."""

    def __init__(self, draw: Callable[[Scaling], Any]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        """Values of shape (N, 6) to the same shape."""
        return self.layer(x) * float(self.draw(self))


class NamingAGlobal(nn.Module):
    """Drops its layer by a generator of the module's file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Values of shape (N, 6) to the same shape."""
        return x if NUMPY.random() < 0.01 else self.layer(x)


# Most of these draws say the same each time, so that no comparison of steps could find them.
DRAWS: dict[str, tuple[Callable[[Scaling], Any], str]] = {
    "a rare event": (lambda m: m.python.random() > 1e-9, "Python"),
    "a choice": (lambda m: m.python.choice([1.0, 1.0]), "Python"),
    "a number of a range": (lambda m: m.python.randint(1, 1 + 2**40) > 0, "Python"),
    "a normal number": (lambda m: m.python.gauss(1, 1e-30), "Python"),
    "an order": (lambda m: m.python.shuffle([1, 2, 3]) is None, "Python"),
    "a global generator": (lambda m: PYTHON.uniform(1, 1 + 1e-30), "Python"),
    "numpy's new kind": (lambda m: m.numpy.random() > 1e-9, "numpy"),
    "numpy's whole numbers": (lambda m: m.numpy.integers(1, 2**40) > 0, "numpy"),
    "numpy's old kind": (lambda m: m.legacy.rand() > 1e-9, "numpy"),
}


@pytest.mark.parametrize("what", DRAWS)
def test_draws_from_generators_of_the_model_are_refused(what: str) -> None:
    draw, whose = DRAWS[what]
    model = Scaling(draw)
    states = model.python.getstate(), model.numpy.bit_generator.state
    with pytest.raises(CaptureError, match=f"{whose}'s random module"):
        capture(model, Arguments((X,), {}))
    # Neither generators nor their class are changed.
    assert (model.python.getstate(), model.numpy.bit_generator.state) == states
    assert not {"random", "getrandbits"} & vars(random.Random).keys()


OF_SYSTEM: dict[str, Callable[[], Any]] = {
    "a new generator": lambda: np.random.default_rng().random() > 1e-9,
    "a new one of the old kind": lambda: np.random.RandomState().rand() > 1e-9,
    "a generator of the system": lambda: random.SystemRandom().random() > 1e-9,
    "a secret": lambda: secrets.randbelow(2**40) >= 0,
    "a name for a run": lambda: uuid.uuid4().int > 0,
    "bytes": lambda: len(os.urandom(1)),
}


@pytest.mark.parametrize("what", OF_SYSTEM)
def test_draws_from_the_system_are_refused(what: str) -> None:
    draw, before = OF_SYSTEM[what], os.urandom
    with pytest.raises(CaptureError, match=r"the system's random numbers"):
        capture(Scaling(lambda _: draw()), Arguments((X,), {}))
    assert os.urandom is before and vars(random)["_urandom"] is before


def test_what_a_forward_imports_may_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_by_itself.py").write_text("import uuid\nNAME = uuid.uuid4().hex\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def draw(_: Scaling) -> float:
        return float(bool(importlib.import_module("named_by_itself").NAME))

    capture(Scaling(draw), Arguments((X,), {}))


def test_a_generator_that_is_made_with_a_seed_is_a_constant() -> None:
    capture(Scaling(lambda _: np.random.default_rng(3).random()), Arguments((X,), {}))


def test_so_are_those_from_what_a_forward_names() -> None:
    state = NUMPY.bit_generator.state
    with pytest.raises(CaptureError, match="numpy's random module"):
        capture(NamingAGlobal(), Arguments((X,), {}))
    assert NUMPY.bit_generator.state == state


def test_generators_that_are_not_drawn_from_do_not_matter() -> None:
    capture(Scaling(lambda module: 1.0), Arguments((X,), {}))


def test_other_threads_may_draw_meanwhile() -> None:
    drawn: list[float] = []
    thread = threading.Thread(target=lambda: drawn.append(PYTHON.random()))
    with require_torch_randomness(nn.Linear(6, 6)):
        thread.start()
        thread.join()
    assert len(drawn) == 1


BY_TORCH: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": functional.dropout,
    "noise": lambda value, amount: value + amount * torch.randn_like(value),
    "uniform": lambda value, amount: value * torch.rand(value.shape[-1]).add(amount),
    "coins": lambda value, amount: value * torch.bernoulli(torch.full_like(value, amount)),
    "whole numbers": lambda value, amount: value * torch.randint(1, 4, value.shape).add(amount),
    "an exponential": lambda value, amount: value * torch.empty(WIDTH).exponential_(1 + amount),
}


class Drawing(Two):
    """Two layers, with a draw before each."""

    def __init__(self, names: Sequence[str], amount: float) -> None:
        super().__init__()
        self.names, self.amount = tuple(names), amount

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        first, second = (BY_TORCH[name] for name in self.names)
        value = torch.tanh(self.first(first(value, self.amount)))
        return self.second(second(value, self.amount))


@settings(max_examples=examples(8), deadline=None)
@given(
    st.lists(st.sampled_from(sorted(BY_TORCH)), min_size=2, max_size=2),
    st.floats(0.1, 0.9),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.sampled_from(["none", "stage"]),
    st.integers(0, 2**31),
)
def test_neither_cut_nor_order_nor_recompute_changes_what_is_drawn(
    names: list[str], amount: float, schedule: str, recompute: str, seed: int
) -> None:
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for options in ({"k": 1}, {"k": 2, "schedule": schedule, "recompute": recompute}):
        torch.manual_seed(0)
        pipeline = pipecompile(
            Drawing(names, amount),
            batch,
            microbatches=4,
            costs="flops",
            loss_fn=mean_square,
            seed=seed,
            **options,  # type: ignore[arg-type]
        )
        loss = pipeline.step(batch)
        found.append([loss, *(parameter.grad for parameter in pipeline.parameters())])
    assert all(map(torch.equal, *found))
