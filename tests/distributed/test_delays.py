"""Ranks that are late by random times: no deadlock, and the gradients of the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import delay_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep


@pytest.mark.parametrize(
    ("ranks", "schedule", "count"),
    [
        (3, "1f1b", 60),
        (2, "interleaved-1f1b", 20),
        (2, "zb-v", 20),
        sweep(3, "1f1b", 200),
        sweep(3, "zb-h1", 200),
        sweep(2, "interleaved-1f1b", 200),
        sweep(2, "looped-bfs", 200),
        sweep(2, "zb-v", 200),
        sweep(2, "dualpipe-v", 200),
    ],
)
def test_steps_under_random_delays(
    workers: Workers, tmp_path: Path, ranks: int, schedule: str, count: int
) -> None:
    args = ranks, schedule, count
    for worst in workers.run(ranks, jobs.delayed_steps, *args, folder=str(tmp_path)):
        assert worst <= 1e-12


@pytest.mark.parametrize(
    ("on", "schedule", "microbatches", "count"),
    [
        ((1, 1, 1), "pipedream", 1, 50),
        ((2, 1), "pipedream", 2, 40),
        sweep((1, 1, 1), "pipedream", 1, 200),
        sweep((1, 1, 1), "pipedream-vertical-sync", 1, 200),
        sweep((1, 1, 1), "pipedream-2bw", 2, 200),
        sweep((1, 2, 1), "pipedream", 2, 100),
        sweep((3, 1), "pipedream-2bw", 3, 100),
    ],
)
def test_minibatches_in_flight_under_random_delays(
    workers: Workers,
    tmp_path: Path,
    on: tuple[int, ...],
    schedule: str,
    microbatches: int,
    count: int,
) -> None:
    args = on, schedule, microbatches, count
    assert all(workers.run(sum(on), jobs.delayed_minibatches, *args, folder=str(tmp_path)))
