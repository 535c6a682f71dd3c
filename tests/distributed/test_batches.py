"""Batches of any size on gloo ranks, against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import batch_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [
        (2, 1, {"schedule": "1f1b", "recompute": "stage"}),
        (2, 1, {"schedule": "interleaved-1f1b", "recompute": "block"}),
        (2, 2, {"schedule": "1f1b", "batch_norm": "minibatch"}),
        (4, 1, {"schedule": "zb-h1"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_a_step_over_any_batch_is_the_unsplit_step(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, options: dict[str, Any]
) -> None:
    folder, count = str(tmp_path), ranks * replicas
    for differences in workers.run(
        count, jobs.steps_of_every_size, ranks, replicas, options, folder=folder
    ):
        assert max(differences) <= EXACT


def test_ranks_that_read_nothing_need_no_batch(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(4, jobs.given_to_the_outer_ranks, 4, folder=str(tmp_path))
    for far, of_a_smaller_one, of_none in found:
        assert max(far) <= EXACT
        assert "the number of samples is 9 on rank 0 and 16 on rank 1" in of_a_smaller_one
        assert "the batch is None on a rank that has the first or the last stage" in of_none


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_steps_that_accumulate_may_have_batches_of_several_sizes(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    for difference in workers.run(
        ranks * replicas, jobs.accumulated, ranks, replicas, folder=str(tmp_path)
    ):
        assert difference <= EXACT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 1)])
def test_evaluation_of_any_batch_and_its_loss(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    rows = workers.run(ranks * replicas, jobs.evaluated, ranks, replicas, folder=str(tmp_path))
    assert [len(row) for row in rows] == ([0] * (ranks - 1) + [8]) * replicas
    assert max(value for row in rows for value in row) <= EXACT


def test_replicas_that_are_given_unequally_many_samples(workers: Workers, tmp_path: Path) -> None:
    for text, has_gradients, difference in workers.run(
        4, jobs.unequal_replicas, 2, 2, folder=str(tmp_path)
    ):
        assert text.startswith(
            "ranks must step alike, but the number of samples is 16 on rank 0 and 13 on rank 2"
        )
        assert not has_gradients
        assert difference <= EXACT


def test_a_model_from_the_meta_device(workers: Workers, tmp_path: Path) -> None:
    for difference in workers.run(2, jobs.from_the_meta_device, folder=str(tmp_path)):
        assert difference <= EXACT


def test_a_recorded_step_has_the_bytes_of_a_smaller_microbatch(
    workers: Workers, tmp_path: Path
) -> None:
    first, _ = workers.run(2, jobs.recorded, folder=str(tmp_path))
    assert len(first) == 4
    assert first[0] == first[1] == first[2] == first[3] * 4 // 3
