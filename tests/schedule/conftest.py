"""Hypothesis strategies and one-line helpers for schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import generate
from pipecompile.schedule.simulate import simulate

Lowered = Callable[..., Schedule]


@pytest.fixture(scope="session")
def lowered() -> Lowered:
    """Makes a named schedule of unit times, lowered."""

    def make(name: str, stages: int, microbatches: int, recompute: bool = False) -> Schedule:
        gradient = [True] * (stages - 1)
        compute = generate(name, range(stages), microbatches, recompute)
        return lower(compute, simulate(compute, lambda _: 1, lambda *_: 0, gradient), gradient)

    return make
