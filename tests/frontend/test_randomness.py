"""Forwards that draw from generators of their own are refused, however they come by them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.randomness import require_torch_randomness
from pipecompile.frontend.signature import Arguments

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
