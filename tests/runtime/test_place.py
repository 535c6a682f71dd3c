"""A plan under another number of processes: the advice names ranks and stages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipecompile.errors import InputError, StalePlanError
from pipecompile.ir.links import Links
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


def test_links_of_ranks_that_a_mesh_numbers_otherwise_are_refused() -> None:
    plan = planned(EVEN, schedule="1f1b")
    delays = tuple((0,) * 8 for _ in range(8))
    links = Links(bandwidth_bytes_per_s=None, latency_ns=delays)
    options = replace(plan.options, replicas=2)
    of_eight = replace(plan, options=options, replicas=2, links=links)
    in_rows = place.RankPlace(replicas=2, pipelines=((0, 1, 2, 3), (4, 5, 6, 7)))
    in_columns = place.RankPlace(replicas=2, pipelines=((0, 2, 4, 6), (1, 3, 5, 7)))
    place.check_links(of_eight, in_rows)
    place.check_links(plan, in_columns)  # whose links are the same for all ranks
    with pytest.raises(InputError, match=r"the mesh has the pipelines \[\[0, 2, 4, 6\]"):
        place.check_links(of_eight, in_columns)
