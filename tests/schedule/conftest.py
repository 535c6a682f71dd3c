from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal

Lowered = Callable[..., Schedule]


@pytest.fixture(scope="session")
def lowered() -> Lowered:
    """Returns a named schedule of unit times with its transfers."""

    def make(name: str, stages: int, microbatches: int, recompute: bool = False) -> Schedule:
        return add_transfers(
            equal(range(stages), microbatches),
            generate(name, range(stages), microbatches, recompute),
        )

    return make
