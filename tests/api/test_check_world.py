"""A plan under another number of processes: the advice names ranks and stages."""

from __future__ import annotations

import pytest

from pipecompile.api import pipeline
from pipecompile.errors import StalePlanError
from tests.schedule.test_selection import EVEN, planned


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1f1b", "for 4 ranks, but 8 processes run; .* ranks=8, which is k=8$"),
        ("zb-v", r"for 2 ranks .*'zb-v' .*k=4 stages 2 on a rank.* ranks=8, which is k=16$"),
    ],
)
def test_other_processes_than_ranks_are_answered_with_k(
    schedule: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(EVEN, schedule=schedule)
    monkeypatch.setattr(pipeline.world, "size", lambda: 8)
    with pytest.raises(StalePlanError, match=message):
        pipeline.check_world(plan)
    monkeypatch.setattr(pipeline.world, "size", lambda: plan.ranks)
    pipeline.check_world(plan)
