"""Weights in flight where stages have several ranks, over gloo, against a plain loop in float64."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from pipecompile.ir.stage_ranks import placement_of
from pipecompile.schedule.named_orders import weight_copies
from tests.distributed import stage_replicas_in_flight_jobs as jobs
from tests.distributed.continuous_jobs import resumed
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(8)
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
    ranks = workers.run(sum(replicas), jobs.trained, *args, folder=str(tmp_path))
    for found in ranks:
        for losses, weights, from_synchronous, _ in found.values():
            assert max(losses, weights) <= EXACT, found
            assert from_synchronous > 1e-3
    # The plan counts those of the replica that needs most, the first one: the others may read newer
    # versions.
    planned = weight_copies(schedule, placement_of(replicas), microbatches)
    held = iter([{copies for *_, copies in found.values()} for found in ranks])
    for copies, count in zip(planned, replicas, strict=True):
        first, *others = islice(held, count)
        assert first == {copies.own}
        assert all(max(each) <= copies.own for each in others)


def test_the_norm_counts_the_gradients_of_replicas_once(workers: Workers, tmp_path: Path) -> None:
    args = (2, 1), "pipedream-2bw", 2
    for found in workers.run(3, jobs.trained, *args, max_norm=0.1, folder=str(tmp_path)):
        for losses, weights, from_unclipped, _ in found.values():
            assert max(losses, weights) <= EXACT, found
            assert from_unclipped > 1e-2


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_run_that_is_saved_on_the_way_goes_on_as_it_would_have(
    workers: Workers, tmp_path: Path, schedule: str
) -> None:
    args = schedule, 2, str(tmp_path / "checkpoint"), (2, 1)
    for done, *are_same in workers.run(3, resumed, *args, folder=str(tmp_path)):
        assert 3 <= done < 8
        assert all(are_same)


@pytest.mark.parametrize("schedule", ["pipedream"])
def test_a_rank_that_waits_for_the_sums_of_an_update_is_not_at_fault(
    workers: Workers, tmp_path: Path, schedule: str
) -> None:
    said = workers.run(3, jobs.failed_update, schedule, folder=str(tmp_path))
    assert all("in 0STEP" in text for text in said), said
    assert "planted" in said[1]
    assert not any("rank 0 failed" in text or "rank 2 failed" in text for text in said), said
