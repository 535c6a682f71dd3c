"""Losses with parameters on ranks: they are on the last stage, and trained like its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecompile.frontend.loss_reduction import LossReduction
from tests.distributed import loss_module_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep

EXACT = 1e-12
NAMES = ["loss_fn.layer.bias", "loss_fn.layer.weight", "loss_fn.temperature"]


@pytest.mark.parametrize(
    ("ranks", "replicas", "reduction", "options"),
    [
        (2, 2, "mean", {"schedule": "zb-h1"}),
        (2, 1, "weighted", {"schedule": "1f1b", "recompute": "stage"}),
        sweep(2, 2, "sum", {"schedule": "1f1b"}),
        sweep(2, 2, "weighted", {"schedule": "interleaved-1f1b"}),
        sweep(1, 2, "mean", {"schedule": "gpipe"}),
        sweep(2, 1, "mean", {"schedule": "1f1b", "engine": "torch"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_gradients_are_those_of_the_unsplit_model(
    workers: Workers,
    tmp_path: Path,
    ranks: int,
    replicas: int,
    reduction: LossReduction,
    options: dict[str, Any],
) -> None:
    found = workers.run(
        ranks * replicas, jobs.steps, ranks, replicas, reduction, options, folder=str(tmp_path)
    )
    for rank, (names, distance) in enumerate(found):
        assert names == (NAMES if rank % ranks == ranks - 1 else [])
        assert distance <= EXACT


def test_stages_that_fsdp2_divides(workers: Workers, tmp_path: Path) -> None:
    for rank, (names, distance) in enumerate(
        workers.run(4, jobs.sharded, 2, 2, folder=str(tmp_path))
    ):
        assert names == (NAMES if rank % 2 else [])
        assert distance <= EXACT


def test_checkpoints_of_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    (state, norms), *others = workers.run(4, jobs.saved, path, folder=str(tmp_path))
    assert state is not None and {"loss_fn.center", *NAMES} < state.keys()
    for left, right in (norms, *(norms for _, norms in others)):
        assert abs(left - right) <= EXACT * left
    parts = workers.run(2, jobs.loaded, path, folder=str(tmp_path))
    whole = jobs.unsplit_from(path)
    assert set().union(*parts) == state.keys() == whole.keys()
    for part in (*parts, whole):
        assert all(torch.equal(value, state[name]) for name, value in part.items())


def test_a_rank_without_the_last_stage_gives_it_no_memory(workers: Workers, tmp_path: Path) -> None:
    names = ["loss_fn.layers.0.bias", "loss_fn.layers.0.weight"]
    assert workers.run(2, jobs.on_meta, folder=str(tmp_path)) == [([], True), (names, True)]
