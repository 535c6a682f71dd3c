"""The guess of a step: what equal stages take, however many ranks there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.api.choices import requested_options
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Options
from pipecompile.planner.likely_step import LikelyStep, likely_step
from pipecompile.planner.setting_bounds import Work
from tests.chains_of_nodes import chain

WORK = Work(
    forward_ns=4_000_000,
    backward_ns=8_000_000,
    largest_ns=1,
    input_ns=4_000_000,
    saved_bytes=64 << 20,
)


@given(st.sampled_from([1, 2, 4, 12, 16, 64]), st.sampled_from([1, 2, 8, 64, 256]))
def test_it_is_the_step_of_1f1b_on_equal_stages(ranks: int, microbatches: int) -> None:
    options = requested_options(k=ranks, microbatches=microbatches, costs="flops", memory="80GB")
    guess = likely_step(WORK, options, state_bytes=0)
    exact = (microbatches + ranks - 1) * 12_000_000 / ranks
    assert guess.step_ns == pytest.approx(exact, rel=0.05)
    # The first rank holds as many microbatches as there are ranks, if there are so many.
    held = min(ranks, microbatches) * (64 << 20) / ranks
    assert guess.filled == pytest.approx(held / 80e9)


def test_what_must_be_recomputed_makes_it_longer() -> None:
    options = requested_options(k=8, microbatches=64, costs="flops", recompute="auto", memory="1GB")
    loose = likely_step(WORK, options, state_bytes=0)
    tight = likely_step(WORK, options, state_bytes=8 * (10**9 - (32 << 20)))
    assert tight.step_ns > loose.step_ns
    assert loose.filled < tight.filled <= 1


def recomputing(schedule: str) -> Options:
    return requested_options(
        k=8, microbatches=64, costs="flops", schedule=schedule, recompute="stage", memory="80GB"
    )


def test_halves_of_backwards_hold_what_waits_between_them_whatever_is_recomputed() -> None:
    filled = {
        schedule: likely_step(WORK, recomputing(schedule), state_bytes=0).filled
        for schedule in ("1f1b", "zb-h1", "zb-h2")
    }
    assert filled["1f1b"] == pytest.approx((8 << 20) / 80e9)
    # The last rank puts off as many W as there are ranks, in zb-h2 nearly twice as many, and one
    # more microbatch is being recomputed.
    assert filled["zb-h1"] == pytest.approx((8 + 1) * (8 << 20) / 80e9)
    assert filled["zb-h2"] == pytest.approx((15 + 1) * (8 << 20) / 80e9)


def test_messages_are_held_for_microbatches_in_flight() -> None:
    boundary = 1 << 20
    sending = replace(WORK, boundary_bytes=boundary)
    for schedule, in_flight in (("1f1b", 8), ("gpipe", 64)):
        guess = likely_step(sending, recomputing(schedule), state_bytes=0)
        # One microbatch is recomputed. Of each in flight there is what the stage received and what
        # it sent, and two gradients, halves of what crosses a boundary, are unread.
        held = (8 << 20) + in_flight * boundary + boundary
        assert guess.filled == pytest.approx(held / 80e9)


@given(st.sampled_from([2, 4, 16, 64]), st.sampled_from([1, 2, 8, 64]))
def test_messages_are_under_way_while_a_pipeline_is_filled_and_emptied(
    ranks: int, microbatches: int
) -> None:
    # A message takes a tenth of a stage. Under gpipe there is one for each boundary each way.
    sending = replace(WORK, boundary_bytes=2 << 20)
    message = 12_000_000 // ranks // 10
    options = requested_options(k=ranks, microbatches=microbatches, costs="flops", schedule="gpipe")
    free, slow = (
        likely_step(sending, options, 0, links=Links.of(Link(latency_ns=ns))).step_ns
        for ns in (0, message)
    )
    assert slow - free == pytest.approx(2 * (ranks - 1) * message, rel=0.15)


def test_what_crosses_a_narrow_boundary_goes_forward_and_back() -> None:
    wide, narrow = 100, 7
    sizes = [narrow if place % 10 == 9 else wide for place in range(39)]
    assert Work.of(chain([(1, 2)] * 40, sizes)).boundary_bytes == 2 * narrow
    assert Work.of(chain([(1, 2)] * 40, [wide] * 39)).of_part(4).boundary_bytes == 2 * wide // 4
    assert Work.of(chain([(1, 2)], [])).boundary_bytes == 0


@pytest.mark.parametrize("recompute", ["none", "stage", "auto"])
@pytest.mark.parametrize("memory", ["80GB", "40MB"])
@given(st.integers(1, 12))
def test_a_search_is_likely_to_be_no_longer_than_a_named_order_that_may_fit(
    recompute: str, memory: str, microbatches: int
) -> None:
    def guess(schedule: str, work: Work = WORK) -> LikelyStep:
        options = requested_options(
            k=4,
            microbatches=microbatches,
            costs="flops",
            schedule=schedule,
            recompute=recompute,
            memory=memory,
        )
        return likely_step(work, options, state_bytes=0)

    searched = guess("search")
    for named in (guess("1f1b"), guess("zb-h1"), guess("gpipe")):
        if named.filled <= 1:
            assert searched.filled <= 1
            assert searched.step_ns <= named.step_ns
    # Without the times of their halves, backwards are not split.
    whole = replace(WORK, input_ns=None)
    if memory == "80GB":
        assert guess("search", whole).step_ns == guess("1f1b", whole).step_ns
