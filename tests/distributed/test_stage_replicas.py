"""Stages on several ranks that take microbatches in turns, against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import stage_replica_jobs as jobs
from tests.distributed.action_memory_jobs import held_at_actions
from tests.distributed.training_jobs import MICROBATCH
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("replicas", [(2, 1), (3, 1), (1, 2, 1)])
def test_gradients_and_loss_are_those_of_the_unsplit_model(
    workers: Workers, tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    ranks = workers.run(
        sum(replicas),
        jobs.gradients_and_loss,
        replicas,
        ["1f1b", "gpipe"],
        folder=str(tmp_path),
    )
    for gradients, loss, _ in ranks:
        assert gradients <= EXACT
        assert loss <= EXACT
    held = [[stage] for stage, count in enumerate(replicas) for _ in range(count)]
    assert [stages for *_, stages in ranks] == held


@pytest.mark.parametrize("samples", [1, MICROBATCH * 2 + 1])
def test_a_smaller_batch_leaves_ranks_without_microbatches(
    workers: Workers, tmp_path: Path, samples: int
) -> None:
    for distances in workers.run(3, jobs.last_batch, (2, 1), samples, folder=str(tmp_path)):
        assert max(distances) <= EXACT, distances


def test_steps_accumulate_and_norms_count_each_parameter_once(
    workers: Workers, tmp_path: Path
) -> None:
    for distances in workers.run(3, jobs.accumulated_and_clipped, (2, 1), folder=str(tmp_path)):
        assert max(distances) <= EXACT, distances


def test_a_checkpoint_goes_on_bit_for_bit(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert all(map(all, workers.run(3, jobs.resumed, (2, 1), folder, folder=folder)))


def test_ranks_hold_what_the_plan_says(workers: Workers, tmp_path: Path) -> None:
    """By the allocator's events, before each action."""
    for wrong in workers.run(
        3, held_at_actions, "1f1b", 6, "none", stage_replicas=(2, 1), folder=str(tmp_path)
    ):
        assert not wrong, wrong


def test_other_ways_to_run_them_are_refused(workers: Workers, tmp_path: Path) -> None:
    workers.run(3, jobs.refused, folder=str(tmp_path))
