"""Gradients that a user's hook sums over replicas, against naive sums of what replicas have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipecompile import InputError, pipecompile
from tests.distributed import communication_hook_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12


def test_a_plain_hook_leaves_the_gradients_of_the_unsplit_model(
    workers: Workers, tmp_path: Path
) -> None:
    """With a tie, which is summed over the ranks of a pipeline too."""
    assert max(workers.run(4, jobs.plain, folder=str(tmp_path))) <= EXACT


def test_gradients_in_bfloat16_are_the_rounded_ones(workers: Workers, tmp_path: Path) -> None:
    for is_rounded_sum, distance in workers.run(4, jobs.compressed, folder=str(tmp_path)):
        assert is_rounded_sum
        assert 1e-4 < distance < 1e-2


def test_power_sgd_is_that_of_its_paper(workers: Workers, tmp_path: Path) -> None:
    for distances in workers.run(4, jobs.low_rank, 6, folder=str(tmp_path)):
        assert max(distances) <= EXACT, distances


def test_what_no_hook_can_sum_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers.run(4, jobs.refused, folder=str(tmp_path))
    x = torch.randn(4, 8)
    options = {
        "costs": "flops",
        "self_check": False,
        "loss_fn": nn.functional.mse_loss,
        "k": 2,
        "microbatches": 2,
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(InputError, match="but there is one only; launch a multiple"):
        pipecompile(model, x, **options).register_comm_hook(None, print)
    asynchronous = pipecompile(model, x, schedule="pipedream", **options)
    with pytest.raises(InputError, match="a communication hook is called once a step"):
        asynchronous.register_comm_hook(None, print)
