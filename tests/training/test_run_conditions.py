"""A plan in a run that is not the one it counts; tests/distributed has the warnings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.links import Links
from pipecompile.runtime.place import RankPlace
from pipecompile.training.run_conditions import check_links
from tests.schedule.test_selection import EVEN, planned


def test_links_of_ranks_that_a_mesh_numbers_otherwise_are_refused() -> None:
    plan = planned(EVEN, schedule="1f1b")
    delays = tuple((0,) * 8 for _ in range(8))
    links = Links(bandwidth_bytes_per_s=None, latency_ns=delays)
    options = replace(plan.options, replicas=2)
    of_eight = replace(plan, options=options, replicas=2, links=links)
    in_rows = RankPlace(replicas=2, pipelines=((0, 1, 2, 3), (4, 5, 6, 7)))
    in_columns = RankPlace(replicas=2, pipelines=((0, 2, 4, 6), (1, 3, 5, 7)))
    check_links(of_eight, in_rows)
    check_links(plan, in_columns)  # whose links are the same for all ranks
    with pytest.raises(InputError, match=r"the mesh has the pipelines \[\[0, 2, 4, 6\]"):
        check_links(of_eight, in_columns)
