from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.lowering import lower
from pipecompile.schedule.named import generate
from tests.schedule.cases import equal

Lowered = Callable[..., Schedule]


@pytest.fixture(scope="session")
def lowered() -> Lowered:
    """Makes a named schedule of unit times, lowered."""

    def make(name: str, stages: int, microbatches: int, recompute: bool = False) -> Schedule:
        return lower(
            equal(range(stages), microbatches),
            generate(name, range(stages), microbatches, recompute),
        )

    return make
