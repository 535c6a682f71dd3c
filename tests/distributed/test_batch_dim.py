"""Batches in another dimension than 0 on gloo ranks, against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import batch_dim_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [(2, 1, {"schedule": "1f1b", "recompute": "stage"}), (2, 2, {"schedule": "zb-h1"})],
    ids=["2x1", "2x2"],
)
def test_steps_are_those_of_the_loop(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, options: dict[str, Any]
) -> None:
    for differences in workers.run(
        *(ranks * replicas, jobs.steps, ranks, replicas, options), folder=str(tmp_path)
    ):
        assert len(differences) == 8
        assert max(differences) <= EXACT


def test_evaluations_are_joined_along_dimension_1(workers: Workers, tmp_path: Path) -> None:
    rows = workers.run(4, jobs.evaluated, 2, 2, folder=str(tmp_path))
    assert [len(row) for row in rows] == [0, 6, 0, 6]
    assert max(rows[1] + rows[3]) <= EXACT


def test_replicas_of_unequal_batches_are_refused(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(2, jobs.unequal_replicas, folder=str(tmp_path)):
        assert "the number of samples is 8 on rank 0 and 7 on rank 1" in text
