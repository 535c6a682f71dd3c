"""Ranks that are late by random times: no deadlock, and the gradients of the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import delay_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep

TWO_STAGES = ("interleaved-1f1b", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v")


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "schedule", "count", "replicas"),
    [
        (3, "1f1b", 60, 1),
        (2, "interleaved-1f1b", 20, 1),
        (2, "zb-v", 20, 1),
        (2, "zb-h1", 20, 2),
        *(sweep(3, schedule, 200, 1) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
        *(sweep(2, schedule, 200, 1) for schedule in TWO_STAGES),
        sweep(2, "1f1b", 200, 2),
        sweep(2, "zb-v", 200, 2),
    ],
)
def test_steps_under_random_delays(
    workers: Workers, tmp_path: Path, ranks: int, schedule: str, count: int, replicas: int
) -> None:
    args = ranks, schedule, count, replicas
    for worst in workers.run(ranks * replicas, jobs.delayed_steps, *args, folder=str(tmp_path)):
        assert worst <= 1e-12


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("on", "schedule", "microbatches", "count", "replicas"),
    [
        ((1, 1, 1), "pipedream", 1, 50, 1),
        ((2, 1), "pipedream", 2, 40, 1),
        ((1, 1), "pipedream-2bw", 2, 20, 2),
        sweep((1, 1, 1), "pipedream", 1, 200, 1),
        sweep((1, 1, 1), "pipedream-vertical-sync", 1, 200, 1),
        sweep((1, 1, 1), "pipedream-2bw", 2, 200, 1),
        sweep((1, 1), "pipedream", 1, 200, 2),
        sweep((1, 2, 1), "pipedream", 2, 200, 1),
        sweep((3, 1), "pipedream-2bw", 3, 200, 1),
    ],
)
def test_minibatches_in_flight_under_random_delays(
    workers: Workers,
    tmp_path: Path,
    on: tuple[int, ...],
    schedule: str,
    microbatches: int,
    count: int,
    replicas: int,
) -> None:
    args = on, schedule, microbatches, count, replicas
    ranks = sum(on) * replicas
    assert all(workers.run(ranks, jobs.delayed_minibatches, *args, folder=str(tmp_path)))
