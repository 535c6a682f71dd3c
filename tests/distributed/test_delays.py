"""Ranks that are late by random times: no deadlock, and the gradients of the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import delay_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep


@pytest.mark.parametrize(
    ("schedule", "count"), [("1f1b", 60), sweep("1f1b", 200), sweep("zb-h1", 200)]
)
def test_steps_under_random_delays(
    workers: Workers, tmp_path: Path, schedule: str, count: int
) -> None:
    for worst in workers.run(3, jobs.delayed_steps, 3, schedule, count, folder=str(tmp_path)):
        assert worst <= 1e-12


@pytest.mark.parametrize(
    ("schedule", "microbatches", "count"),
    [
        ("pipedream", 1, 50),
        sweep("pipedream", 1, 200),
        sweep("pipedream-vertical-sync", 1, 200),
        sweep("pipedream-2bw", 2, 200),
    ],
)
def test_minibatches_in_flight_under_random_delays(
    workers: Workers, tmp_path: Path, schedule: str, microbatches: int, count: int
) -> None:
    args = 3, schedule, microbatches, count
    assert all(workers.run(3, jobs.delayed_minibatches, *args, folder=str(tmp_path)))
