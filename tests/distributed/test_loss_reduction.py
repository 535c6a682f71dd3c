"""Means, sums and weighted means of losses on ranks, against the whole minibatch in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipecompile.frontend.loss_reduction import LossReduction
from tests.distributed import loss_reduction_jobs as jobs
from tests.distributed.fault_jobs import TIMEOUT
from tests.distributed.workers import Workers
from tests.sweeps import sweep

EXACT = 1e-12
ZERO_BUBBLE = {"schedule": "zb-h1"}


@pytest.mark.parametrize(
    ("ranks", "replicas", "reduction", "options"),
    [
        (2, 1, "weighted", ZERO_BUBBLE),
        (2, 2, "weighted", {"schedule": "1f1b", "recompute": "stage"}),
        (2, 2, "sum", ZERO_BUBBLE),
        sweep(2, 2, "mean", ZERO_BUBBLE),
        sweep(2, 1, "sum", {"schedule": "1f1b"}),
        sweep(1, 2, "weighted", {"schedule": "gpipe"}),
        sweep(2, 1, "weighted", {"schedule": "1f1b", "engine": "torch"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_steps_are_those_of_the_unsplit_model_on_the_whole_minibatch(
    workers: Workers,
    tmp_path: Path,
    ranks: int,
    replicas: int,
    reduction: LossReduction,
    options: dict[str, Any],
) -> None:
    for differences in workers.run(
        ranks * replicas, jobs.steps, ranks, replicas, reduction, options, folder=str(tmp_path)
    ):
        assert max(differences) <= EXACT


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("reduction", ["weighted", "sum", "mean"])
def test_evaluations_count_the_samples_of_all_replicas(
    workers: Workers, tmp_path: Path, reduction: LossReduction
) -> None:
    rows = workers.run(4, jobs.evaluated, 2, 2, reduction, folder=str(tmp_path))
    assert [len(row) for row in rows] == [0, 3, 0, 3]
    assert max(value for row in rows for value in row) <= EXACT


@pytest.mark.parametrize(
    ("weight", "culprit", "words"),
    [
        (-1.0, 0, "a weight that is negative or not finite"),
        (0.0, -1, "in this step are all 0"),
        sweep(float("nan"), 0, "a weight that is negative or not finite"),
    ],
)
def test_all_ranks_refuse_what_the_last_stages_weigh_wrongly(
    workers: Workers, tmp_path: Path, weight: float, culprit: int, words: str
) -> None:
    for text, has_gradients, difference in workers.run(
        4, jobs.refused, weight, culprit, folder=str(tmp_path)
    ):
        assert words in text
        assert not has_gradients
        assert difference <= EXACT


def test_ranks_that_reduce_otherwise_are_told(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(2, jobs.other_reductions, folder=str(tmp_path)):
        assert "whether it was given loss_reduction='mean' is True on rank 0 and False on" in text


def test_a_rank_that_is_late_for_the_weights_is_named(workers: Workers, tmp_path: Path) -> None:
    seen, _ = workers.run(2, jobs.late_for_weights, folder=str(tmp_path))
    assert seen.error == "RankFaultError"
    assert "rank 0 waited in the exchanges at the end of step 1" in seen.text
    assert seen.seconds < TIMEOUT + 2.5


def test_ranks_that_divide_the_work_count_a_weight_once(workers: Workers, tmp_path: Path) -> None:
    for differences in workers.run(4, jobs.divided, folder=str(tmp_path)):
        assert max(differences) <= EXACT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_verify_knows_of_replicas(
    workers: Workers, tmp_path: Path, reduction: LossReduction
) -> None:
    assert all(workers.run(4, jobs.verified, reduction, folder=str(tmp_path)))
