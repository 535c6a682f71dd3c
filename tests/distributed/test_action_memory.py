"""What a rank holds after each action, by the allocator's own events, against the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import action_memory_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("1f1b", "none"),
        ("zb-h1", "none"),
        sweep("gpipe", "none"),
        sweep("gpipe", "stage"),
        sweep("1f1b", "stage"),
        sweep("zb-h1", "stage"),
        sweep("zb-h2", "none"),
        # Two stages on each rank; in a V the last rank has neighbours, which hand storages on.
        sweep("interleaved-1f1b", "none"),
        sweep("zb-v", "none"),
        sweep("dualpipe-v", "none"),
    ],
)
def test_a_microbatch_is_freed_as_soon_as_its_backward_is_done(
    workers: Workers, tmp_path: Path, schedule: str, recompute: str
) -> None:
    """So a rank never holds more than its microbatches in flight, whatever is still to come."""
    for wrong in workers.run(2, jobs.held_at_actions, schedule, 6, recompute, folder=str(tmp_path)):
        assert not wrong, wrong


@pytest.mark.parametrize("late", [0, 1])
def test_messages_that_come_early_take_nothing_more(
    workers: Workers, tmp_path: Path, late: int
) -> None:
    """A receive makes its buffer where the row has it. So the plan's times decide what a rank
    holds, and those of the run do not.
    """
    for wrong in workers.run(
        2, jobs.held_at_actions, "1f1b", 6, "none", late, folder=str(tmp_path)
    ):
        assert not wrong, wrong
