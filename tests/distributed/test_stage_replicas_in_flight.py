"""Weights in flight where stages have several ranks, over gloo, against a plain loop in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import stage_replicas_in_flight_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.parametrize(
    ("replicas", "schedule", "microbatches"),
    [
        ((2, 1), "pipedream", 2),
        ((2, 1), "pipedream", 4),
        ((2, 1), "pipedream-vertical-sync", 2),
        ((2, 1), "pipedream-2bw", 2),
        ((3, 1), "pipedream", 3),
        ((1, 2, 1), "pipedream", 2),
        ((1, 2, 1), "pipedream-vertical-sync", 2),
        ((1, 2, 1), "pipedream-2bw", 4),
    ],
)
def test_replicas_follow_the_recurrence(
    workers: Workers, tmp_path: Path, replicas: tuple[int, ...], schedule: str, microbatches: int
) -> None:
    args = replicas, schedule, microbatches
    for found in workers.run(sum(replicas), jobs.trained, *args, folder=str(tmp_path)):
        for losses, weights, from_synchronous in found.values():
            assert max(losses, weights) <= EXACT, found
            assert from_synchronous > 1e-3
