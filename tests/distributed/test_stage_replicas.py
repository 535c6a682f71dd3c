"""Stages on several ranks that take microbatches in turns, against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import stage_replica_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.parametrize("replicas", [(2, 1), (3, 1), (1, 2, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_and_loss_are_those_of_the_unsplit_model(
    workers: Workers, tmp_path: Path, replicas: tuple[int, ...], schedule: str
) -> None:
    ranks = workers.run(
        sum(replicas), jobs.gradients_and_loss, replicas, schedule=schedule, folder=str(tmp_path)
    )
    for gradients, loss, _ in ranks:
        assert gradients <= EXACT
        assert loss <= EXACT
    held = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    assert [stages for *_, stages in ranks] == [{stage} for stage in held]
