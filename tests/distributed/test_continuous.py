"""Training that never empties the pipeline, over gloo ranks, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import continuous_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12
RULES = {"pipedream": 1, "pipedream-vertical-sync": 1, "pipedream-2bw": 2}


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        (2, 1),
        (2, 2),
        (3, 1),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in ((4, 1), (3, 2), (4, 2))),
    ],
)
@pytest.mark.parametrize("schedule", RULES)
def test_ranks_follow_the_recurrence(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, schedule: str
) -> None:
    microbatches = RULES[schedule]
    if schedule == "pipedream-2bw":
        microbatches = max(microbatches, ranks - 1)  # fewer are refused
    args = ranks, replicas, schedule, microbatches
    for found in workers.run(ranks * replicas, jobs.trained, *args, folder=str(tmp_path)):
        assert all(max(distances) <= EXACT for distances in found.values()), found


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule"),
    [
        (2, 1, "pipedream"),
        (2, 2, "pipedream-2bw"),
        (3, 1, "pipedream-2bw"),
        (3, 1, "pipedream-vertical-sync"),
    ],
)
def test_rates_follow_the_versions_on_each_rank(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, schedule: str
) -> None:
    args = ranks, replicas, schedule, RULES[schedule]
    for found in workers.run(
        ranks * replicas, jobs.trained, *args, halves=True, folder=str(tmp_path)
    ):
        for losses, weights, from_constant_rates in found.values():
            assert max(losses, weights) <= EXACT, found
            assert from_constant_rates > 1e-3


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule"),
    [(2, 1, "pipedream"), (3, 1, "pipedream-2bw"), (2, 2, "pipedream-vertical-sync")],
)
def test_minibatches_that_are_given_one_by_one_are_trained_as_all_of_them_are(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, schedule: str
) -> None:
    args = ranks, replicas, schedule, RULES[schedule]
    found = workers.run(ranks * replicas, jobs.stepped, *args, folder=str(tmp_path))
    assert all(all(are_same) for are_same in found)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_data_is_compared_in_flight_too(workers: Workers, tmp_path: Path, schedule: str) -> None:
    for said in workers.run(2, jobs.given_other_data, schedule, 1, folder=str(tmp_path)):
        assert "target of microbatch 0 has other values on some ranks" in said[0]
        assert all("its messages are lost" in later for later in said[1:])


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_the_norm_is_that_of_all_ranks(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    """Of a tied parameter too, which counts once: each rank steps by itself, a minibatch later."""
    args = ranks, replicas, "pipedream-2bw", 2
    for found in workers.run(
        ranks * replicas, jobs.trained, *args, max_norm=0.1, folder=str(tmp_path)
    ):
        for losses, weights, from_unclipped in found.values():
            assert max(losses, weights) <= EXACT, found
            assert from_unclipped > 1e-3


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "pipedream", "pipedream-vertical-sync"])
def test_a_run_that_is_saved_on_the_way_goes_on_as_it_would_have(
    workers: Workers, tmp_path: Path, schedule: str
) -> None:
    args = schedule, RULES[schedule], str(tmp_path / "checkpoint")
    for done, *are_same in workers.run(2, jobs.resumed, *args, folder=str(tmp_path)):
        assert 3 <= done < 8
        assert all(are_same)
