"""Running averages are merged over replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import batch_norm_jobs as jobs
from tests.distributed.workers import Workers


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_have_the_averages_of_all_data(
    workers: Workers, tmp_path: Path, replicas: int
) -> None:
    large = jobs.norms()
    for step in range(3):
        for norm, values in zip(large, jobs.batch(step), strict=True):
            norm(values)
    first, *others = workers.run(replicas, jobs.trained, 3, folder=str(tmp_path))
    wanted = [buffer for norm in large for buffer in norm.buffers()]
    for got, expected in zip(first, wanted, strict=True):
        assert (got - expected).abs().max() <= 1e-12 * max(1, expected.abs().max().item())
    for other in others:
        assert all(map(torch.equal, first, other))


def test_replicas_that_disagree_are_told(workers: Workers, tmp_path: Path) -> None:
    messages = workers.run(2, jobs.disagreeing, folder=str(tmp_path))
    assert set(messages) == {messages[0]}
    assert "second normalised a batch on only one of replicas 0 and 1" in messages[0]


def test_ranks_without_batch_norms_take_part(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, jobs.without_norms, folder=str(tmp_path)) == [None, None]


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("gpipe", "stage"), ("zb-h1", "none")]
)
def test_stages_on_ranks_have_the_averages_of_the_unsplit_model(
    workers: Workers, tmp_path: Path, schedule: str, recompute: str
) -> None:
    for unequal in workers.run(2, jobs.verified, schedule, recompute, folder=str(tmp_path)):
        assert unequal == []


def test_buffers_that_forwards_write_to_are_named_where_replicas_have_them(
    workers: Workers, tmp_path: Path
) -> None:
    said = workers.run(2, jobs.warned_of_buffers, folder=str(tmp_path))
    assert "the forward writes to 0.mean: each replica has there what it makes" in said[0]
    assert said[1] == ""
