"""A plan under another number of processes: the advice names ranks and stages."""

from __future__ import annotations

import pytest

from pipecompile.errors import StalePlanError
from pipecompile.runtime import place
from tests.schedule.test_selection import EVEN, planned


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1f1b", "for 4 ranks, but 7 processes run; .* ranks=7, which is k=7$"),
        ("zb-v", r"for 2 ranks .*'zb-v' .*k=4 stages 2 on a rank.* ranks=7, which is k=14$"),
    ],
)
def test_other_processes_than_ranks_are_answered_with_k(
    schedule: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(EVEN, schedule=schedule)
    monkeypatch.setattr(place.world, "size", lambda: 7)
    with pytest.raises(StalePlanError, match=message):
        place.check_world(plan)
    for processes in (1, plan.ranks, 3 * plan.ranks):  # the last are replicas
        monkeypatch.setattr(place.world, "size", lambda processes=processes: processes)
        place.check_world(plan)
