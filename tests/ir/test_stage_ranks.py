"""Which ranks run a stage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.stage_ranks import (
    has_stage_replicas,
    placement_of,
    stage_ranks,
    stages_on,
)


@given(st.lists(st.integers(1, 5), min_size=0, max_size=5))
def test_each_rank_has_one_stage_and_each_stage_its_replicas(counts: list[int]) -> None:
    counts = [*counts, 1]
    ranks = stage_ranks(placement_of(counts))
    assert list(map(len, ranks)) == counts
    assert [rank for each in ranks for rank in each] == list(range(sum(counts)))
    assert has_stage_replicas(placement_of(counts)) == (max(counts) > 1)


def test_stages_that_share_ranks_have_one_each() -> None:
    for placement in ([0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0]):
        assert [list(ranks) for ranks in stage_ranks(placement)] == [[rank] for rank in placement]
    assert stages_on([0, 1, 1, 0], 0) == (0, 3)
