"""Long runs: what a rank holds after many minibatches is what it holds after few."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import growth_jobs as jobs
from tests.distributed.workers import Workers
from tests.sweeps import sweep

FEW, SOME, MANY = 40, 90, 500


@pytest.fixture(scope="module")
def fresh_workers() -> Iterator[Workers]:
    """Ranks in which no other test has run: what these leave in allocators moves by megabytes."""
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "counts", "options"),
    [
        ("1f1b", 4, (FEW, SOME), {}),
        ("pipedream-2bw", 4, (FEW, SOME), {}),
        sweep("1f1b", 4, (FEW, MANY), {}),
        sweep("gpipe", 4, (FEW, MANY), {"recompute": "stage"}),
        sweep("interleaved-1f1b", 4, (FEW, MANY), {"stages_per_rank": 2}),
        sweep("zb-h1", 4, (FEW, MANY), {}),
        sweep("zb-v", 4, (FEW, MANY), {}),
        sweep("1f1b", 4, (FEW, MANY), {"engine": "torch"}),
        sweep("pipedream", 1, (FEW, MANY), {}),
        sweep("pipedream-vertical-sync", 1, (FEW, MANY), {"recompute": "stage"}),
        sweep("pipedream-2bw", 4, (FEW, MANY), {}),
    ],
)
def test_what_a_rank_holds_does_not_grow(
    fresh_workers: Workers,
    tmp_path: Path,
    schedule: str,
    microbatches: int,
    counts: tuple[int, int],
    options: dict[str, Any],
) -> None:
    args = schedule, microbatches, counts
    for before, after in fresh_workers.run(
        2, jobs.held_on_the_way, *args, **options, folder=str(tmp_path)
    ):
        assert before.tensor_bytes > 0
        assert after.tensor_bytes == before.tensor_bytes
        assert after.works <= before.works
        assert after.handles <= before.handles
        # Caches of the interpreter and of allocators move by a little.
        assert after.objects - before.objects < 50
        # One message of 8 KB that were kept in each minibatch would be more. Allocators move by a
        # little, and where ranks share no memory gloo itself keeps some 1.2 KB of each all-gather.
        assert after.resident_bytes - before.resident_bytes < 8192 * (counts[1] - counts[0])
