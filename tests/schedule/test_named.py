from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Kind
from pipecompile.schedule.named import NAMES, generate, in_flight
from pipecompile.schedule.simulate import simulate


def _text(name: str, stages: int, microbatches: int, recompute: bool = False) -> list[str]:
    return [" ".join(row) for row in generate(name, range(stages), microbatches, recompute).actions]


def test_gpipe_runs_all_forwards_and_then_all_backwards_in_order() -> None:
    assert _text("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_one_f_one_b_has_at_most_as_many_microbatches_in_flight_as_stages_follow() -> None:
    assert _text("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_every_stage_but_the_last_recomputes_right_before_its_backward() -> None:
    assert _text("gpipe", 2, 2, recompute=True) == ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]
    assert _text("1f1b", 2, 2, recompute=True) == ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"]


def test_forward_only_has_nothing_to_recompute() -> None:
    assert _text("forward-only", 2, 2, recompute=True) == ["0F0 0F1", "1F0 1F1"]


def test_stages_may_lie_on_the_ranks_in_any_order() -> None:
    schedule = generate("gpipe", [1, 0], 1, False)
    assert schedule.actions == (("1F0", "1B0"), ("0F0", "0B0"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="'zigzag' is not known; choose one of 1f1b, forward-only, gpipe"):
        generate("zigzag", range(2), 2, False)


def test_two_stages_on_one_rank_are_refused() -> None:
    with pytest.raises(InputError, match="rank 0 would hold 2"):
        generate("1f1b", [0, 0, 1], 2, False)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_in_flight_is_the_most_that_a_stage_holds(name: str, stages: int, microbatches: int, recompute: bool) -> None:
    for stage, row in enumerate(generate(name, range(stages), microbatches, recompute).rows):
        held = peak = 0
        for action in row:
            held += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            peak = max(peak, held)
        assert peak == in_flight(name, stages, microbatches, stage)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(0, 12))
def test_the_bubble_of_equal_stages_is_the_published_one(name: str, stages: int, more: int) -> None:
    """(K − 1) / (M + K − 1), GPipe's section 2.3, whatever the ratio of backward to forward."""
    microbatches = stages + more
    schedule = generate(name, range(stages), microbatches, False)
    duration = {Kind.FORWARD: 5, Kind.BACKWARD: 11}
    timeline = simulate(schedule, lambda a: duration[a.kind], lambda *_: 0, [True] * (stages - 1))
    bubble = 1 - Fraction(sum(timeline.busy_ns), stages * timeline.makespan_ns)
    assert bubble == Fraction(stages - 1, microbatches + stages - 1)
    assert timeline.bubble == pytest.approx(float(bubble))


def test_every_name_is_generated() -> None:
    assert [generate(name, range(2), 2, False).name for name in NAMES] == list(NAMES)
