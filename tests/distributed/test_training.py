"""What a training run needs beyond a step, on gloo ranks against the unsplit model in float64."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.distributed import training_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 1)])
def test_a_step_of_all_replicas_is_the_unsplit_step(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, schedule: str
) -> None:
    for gradients, loss in workers.run(
        ranks * replicas,
        jobs.gradients_and_loss,
        ranks,
        replicas,
        schedule,
        folder=str(tmp_path),
    ):
        assert gradients <= EXACT
        assert loss <= EXACT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_steps_that_accumulate_exchange_no_gradients(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    folder = str(tmp_path)
    for distance, sums, before in workers.run(
        ranks * replicas, jobs.accumulated, ranks, replicas, folder=folder
    ):
        assert distance <= EXACT
        # The loss is a mean over replicas, on the ranks that have it.
        assert sums == 0 or (replicas > 1 and sums == 2)
        assert before == 0


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("norm_type", [2.0, inf])
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (2, 2)])
def test_clipping_knows_the_norm_of_all_gradients(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, norm_type: float
) -> None:
    for norm, gradients in workers.run(
        ranks * replicas, jobs.clipped, ranks, replicas, norm_type, folder=str(tmp_path)
    ):
        assert norm <= EXACT
        assert gradients <= EXACT


def test_an_overflow_on_one_rank_is_one_on_all(workers: Workers, tmp_path: Path) -> None:
    for scale, moved, norm in workers.run(4, jobs.overflowed, 4, folder=str(tmp_path)):
        assert scale == 4.0
        assert not moved
        assert norm == pytest.approx(1, abs=EXACT)


def test_what_comes_with_the_loss_is_joined_in_the_order_of_the_batch(
    workers: Workers, tmp_path: Path
) -> None:
    first, last = workers.run(2, jobs.with_metrics, 2, folder=str(tmp_path))
    loss, metrics = last[0]
    assert first == (None, last[1])
    assert last[1] == (loss, metrics)
    assert len(metrics["best"]) == 16
    assert 0 <= metrics["right"] <= 1


def test_autocast_given_once_is_that_of_every_forward(workers: Workers, tmp_path: Path) -> None:
    first, last = workers.run(2, jobs.half_precision, 2, folder=str(tmp_path))
    assert first == (True, "")
    assert last == (True, "torch.bfloat16")


OTHER_DATA = {
    "rows in another order": "the input of microbatch 0 has other values",
    "targets in another order": "the target of microbatch 0 has other values",
    "microbatches swapped": "the input of microbatch 1 has other values",
    "a token in the middle": "the input of microbatch 1 has other values",
    "a target in the middle": "the target of microbatch 2 has other values",
    "the last token": "the input of microbatch 3 has other values",
    "fewer samples": "ranks must step alike, but the number of samples is 12 on rank 0 and 16 on",
    "another type": "",  # each rank has its own words
    "no target": "",  # it reads none
    "the same": "",
}


def test_ranks_that_are_given_other_data_are_told(workers: Workers, tmp_path: Path) -> None:
    rows = workers.run(2, jobs.other_data, list(OTHER_DATA), folder=str(tmp_path))
    for said in rows:
        for (way, words), text in zip(OTHER_DATA.items(), said, strict=True):
            assert text.startswith(words), way
            assert bool(text) == (way not in ("no target", "the same")), way


def test_a_tie_of_another_mode_is_summed_once(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(4, jobs.tied_in_another_mode, folder=str(tmp_path))) <= EXACT


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("number", [1, 2, 3, 6])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_a_batch_may_be_refused_in_any_step_and_the_run_goes_on(
    workers: Workers, tmp_path: Path, number: int, ranks: int, replicas: int
) -> None:
    job, folder = jobs.refused_in_step, str(tmp_path)
    results = workers.run(ranks * replicas, job, number, ranks, replicas, folder=folder)
    own, _ = results[1]
    assert "the batch holds 8 microbatches, but the plan was made for 4" in own
    others = [text for rank, (text, _) in enumerate(results) if rank != 1]
    assert others == [f"rank 1 refuses what it was given: {own}"] * (len(results) - 1)
    assert {steps for _, steps in results} == {number + 7}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_ranks_agree_through_the_host_whatever_the_backend(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int
) -> None:
    job, folder = jobs.through_the_host, str(tmp_path)
    results = workers.run(ranks * replicas, job, ranks, replicas, folder=folder)
    for rank, (distance, evaluated, text) in enumerate(results):
        assert distance <= EXACT
        assert evaluated == (rank % ranks == ranks - 1)
        assert "whether it was given everywhere=True is True on rank 0" in text


def test_a_part_of_the_mesh_is_refused(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(4, jobs.part_of_a_mesh, folder=str(tmp_path)):
        assert "has 2 of the 4 processes" in text


def test_replicas_of_one_rank_that_differ_are_told(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(2, jobs.one_rank_each, folder=str(tmp_path)):
        assert "whether it was given accumulate=True is True on rank 0" in text


def test_metrics_are_those_of_all_replicas(workers: Workers, tmp_path: Path) -> None:
    for metrics, wanted in workers.run(2, jobs.metrics_of_replicas, folder=str(tmp_path)):
        assert metrics == pytest.approx(wanted, abs=EXACT)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("a whole number", "{'a': 0.25}"),
        ("another name", "return the same structure on all of them"),
        ("a complex number", "{'a': tensor(1.+2.j)}"),
        ("another type", "{'a': tensor(1."),
        ("nothing", "return the same structure on all of them"),
        ("more", "{'a': 'a scalar'} with its losses on one replica, and {'a': 'a scalar', 'b'"),
    ],
)
def test_metrics_that_differ_between_replicas(
    workers: Workers, tmp_path: Path, which: str, text: str
) -> None:
    for said in workers.run(2, jobs.metrics_that_differ, which, folder=str(tmp_path)):
        assert text in said


def test_sums_of_metrics_of_other_types_on_replicas(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for said in workers.run(2, jobs.metrics_that_differ, "another type", "sum", folder=folder):
        assert said.startswith("{'a': tensor(4.")


def test_replicas_begin_with_the_values_of_the_first_one(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, jobs.values_of_replicas, folder=str(tmp_path)) == [0.0, 0.0]
