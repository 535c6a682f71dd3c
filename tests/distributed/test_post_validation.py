"""Updates that are validated later, against updates that wait for all ranks."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest

from tests.distributed import post_validation_jobs as jobs
from tests.distributed.workers import Workers

# Between the norms of the mixture's gradients.
MAX_NORMS = {"adamw": jobs.MAX_NORM, "momentum": 2.0}


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize("optimizer", jobs.OPTIMIZERS)
@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule"),
    [(2, 1, "1f1b"), (2, 1, "zb-h2"), (2, 2, "zb-h1"), (4, 1, "zb-h2"), (2, 1, "zb-v")],
)
def test_clipped_updates_are_those_of_ranks_that_wait(
    workers: Workers, tmp_path: Path, optimizer: str, ranks: int, replicas: int, schedule: str
) -> None:
    for found in workers.run(
        ranks * replicas,
        jobs.validated,
        ranks,
        replicas,
        optimizer,
        schedule=schedule,
        planted=None,
        max_norm=MAX_NORMS[optimizer],
        folder=str(tmp_path),
    ):
        assert found.is_same
        assert found.stood > 1 and found.rolled_back > 1


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("planted", [nan, inf])
def test_all_ranks_leave_out_what_one_of_them_cannot_use(
    workers: Workers, tmp_path: Path, planted: float
) -> None:
    for found in workers.run(
        4,
        jobs.validated,
        4,
        1,
        "adamw",
        schedule="1f1b",
        planted=planted,
        skip_nonfinite=True,
        folder=str(tmp_path),
    ):
        assert found.is_same
        assert found.total == found.total  # no weight is NaN
        assert (found.stood, found.rolled_back) == (jobs.STEPS - 3, 3)


def test_a_run_that_is_disturbed_goes_on_as_it_would_have(workers: Workers, tmp_path: Path) -> None:
    for are_same in workers.run(2, jobs.disturbed, str(tmp_path / "saved"), folder=str(tmp_path)):
        assert all(are_same)


def test_engines_are_alike_and_each_action_is_recorded_once(
    workers: Workers, tmp_path: Path
) -> None:
    """Also in steps that begin once more after a rollback."""
    (is_first_same, found), (is_second_same, _) = workers.run(
        2, jobs.recorded, folder=str(tmp_path)
    )
    assert is_first_same and is_second_same
    assert len(found) == 6 * 2 and all(found)


def test_the_next_step_begins_before_the_norm_is_known(workers: Workers, tmp_path: Path) -> None:
    """Without post-validation the last rank would wait for ever, and the step would time out."""
    store = str(tmp_path / "store")
    assert all(workers.run(2, jobs.leads, store, post_validation=True, folder=str(tmp_path)))
