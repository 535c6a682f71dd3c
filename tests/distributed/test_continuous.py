"""Training that never empties the pipeline, over gloo ranks, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import continuous_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12
RULES = {"pipedream": 1, "pipedream-vertical-sync": 1, "pipedream-2bw": 2}


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("schedule", RULES)
def test_ranks_follow_the_recurrence(
    workers: Workers, tmp_path: Path, ranks: int, replicas: int, schedule: str
) -> None:
    for found in workers.run(
        ranks * replicas,
        jobs.trained,
        ranks,
        replicas,
        schedule,
        RULES[schedule],
        folder=str(tmp_path),
    ):
        assert all(max(distances) <= EXACT for distances in found.values()), found
