"""Batches of several shapes on gloo ranks, against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import shape_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [(2, 1, {"schedule": "1f1b", "recompute": "stage"}), (2, 2, {"schedule": "zb-h1"})],
    ids=["2x1", "2x2"],
)
def test_steps_of_alternating_shapes_are_the_unsplit_ones(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, options: dict[str, Any]
) -> None:
    for differences in workers.run(
        *(ranks * replicas, jobs.steps_of_both_shapes, ranks, replicas, options),
        folder=str(tmp_path),
    ):
        assert len(differences) == 8
        assert max(differences) <= EXACT


def test_further_lengths_share_one_capture_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    shared = "recorded with open lengths"
    assert (
        workers.run(2, jobs.ways_of_captures, folder=str(tmp_path))
        == [["recorded", shared, shared]] * 2
    )


def test_evaluation_of_both_shapes(workers: Workers, tmp_path: Path) -> None:
    rows = workers.run(2, jobs.evaluated, 2, folder=str(tmp_path))
    assert [len(row) for row in rows] == [0, 8]
    assert max(rows[1]) <= EXACT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (1, 2)])
def test_ranks_and_replicas_with_different_shapes_are_told(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    """Both shapes were run before, so that no rank has anything to prepare."""
    for texts in workers.run(2, jobs.different_shapes, ranks, replicas, folder=str(tmp_path)):
        assert len(texts) == ranks
        for text in texts:
            assert text.startswith("ranks must step alike, but the input of a microbatch is")
            assert "((2, 16), torch.int64),) on rank 0 and (((4, 8)," in text


def test_a_model_from_the_meta_device(workers: Workers, tmp_path: Path) -> None:
    for difference in workers.run(2, jobs.from_the_meta_device, folder=str(tmp_path)):
        assert difference <= EXACT
