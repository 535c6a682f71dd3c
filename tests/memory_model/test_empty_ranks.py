"""What ranks take before they hold anything, beside plans and beside what allocators add."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.api.choices import requested_options
from pipecompile.ir.amount import AllocatorName
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.empty_ranks import empty_rank_bytes, room_of_ranks
from pipecompile.memory_model.rank import fixed_bytes
from pipecompile.planner.draft import draft
from pipecompile.schedule.placement import SHAPES, place
from tests.api.sized_costs import ChainNode, SizedChain


@pytest.mark.parametrize(
    ("k", "schedule"),
    [(1, "1f1b"), (2, "1f1b"), (4, "zb-h1"), (8, "interleaved-1f1b"), (8, "zb-v")],
)
def test_it_is_what_plans_say_of_each_rank(k: int, schedule: str) -> None:
    chain = SizedChain((ChainNode(),) * 8, samples=8)
    options = requested_options(k=k, microbatches=8, schedule=schedule, costs="flops")
    plan = draft(chain.graph(options), options, **chain.source(options)._asdict())
    assert ALLOCATORS[plan.allocator].peer_bytes
    empty = empty_rank_bytes(plan.schedule.placement, plan.ranks, plan.allocator)
    assert empty == tuple(fixed_bytes(plan, rank) for rank in range(plan.ranks))


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from(sorted(ALLOCATORS)),
    st.data(),
)
def test_the_room_is_the_most_whose_bound_is_below_the_cap(
    shape: str, ranks: int, each: int, allocator: AllocatorName, data: st.DataObject
) -> None:
    placement = place(shape, ranks, each)
    empty = empty_rank_bytes(placement, ranks, allocator)
    caps = [fixed + data.draw(st.integers(0, 10**10)) for fixed in empty]
    for cap, fixed, room in zip(
        caps, empty, room_of_ranks(caps, placement, allocator), strict=True
    ):
        held = [fixed + size + size // ALLOCATORS[allocator].share for size in (room, room + 1)]
        assert held[0] <= cap < held[1]
    below = room_of_ranks([fixed - 1 for fixed in empty], placement, allocator)
    assert all(room < 0 for room in below)
