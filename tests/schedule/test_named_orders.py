from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import BACKWARDS, Kind
from pipecompile.schedule.named_orders import (
    ASYNCHRONOUS,
    NAMES,
    SPLIT,
    fitting_names,
    fullest_moment,
    generate,
    peak_in_flight,
    required_placement,
)
from pipecompile.schedule.placement import place

SYNCHRONOUS = [name for name in NAMES if name not in ASYNCHRONOUS]


def _text(
    name: str, placement: Sequence[int], microbatches: int, recompute: bool = False
) -> list[str]:
    return [" ".join(row) for row in generate(name, placement, microbatches, recompute).actions]


def test_gpipe_runs_all_forwards_and_then_all_backwards_in_order() -> None:
    assert _text("gpipe", range(2), 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_gpipe_takes_each_microbatch_through_neighbouring_stages_at_once() -> None:
    assert _text("gpipe", [0, 0, 1, 0], 2) == [
        "0F0 1F0 0F1 1F1 3F0 3F1 3B0 3B1 1B0 0B0 1B1 0B1",
        "2F0 2F1 2B0 2B1",
    ]


def test_one_f_one_b_has_at_most_as_many_microbatches_in_flight_as_stages_follow() -> None:
    assert _text("1f1b", range(3), 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_one_f_one_b_treats_neighbouring_stages_as_one() -> None:
    assert _text("1f1b", [0, 0, 1, 1], 2) == [
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
        "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1",
    ]


def test_every_stage_but_the_last_recomputes_right_before_its_backward() -> None:
    assert _text("gpipe", range(2), 2, recompute=True) == [
        "0F0 0F1 0R0 0B0 0R1 0B1",
        "1F0 1F1 1B0 1B1",
    ]
    assert _text("zb-h1", range(2), 2, recompute=True) == [
        "0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    ]
    (row, _, _) = generate("gpipe", range(3), 1, [False, True, True]).actions
    assert row == ("0F0", "0B0")


def test_the_last_microbatch_of_a_step_may_be_left_out() -> None:
    """As `except_last` in torchgpipe."""
    rows = generate("gpipe", range(2), 3, True, except_last=True).actions
    assert [" ".join(row) for row in rows] == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_forward_only_has_nothing_to_recompute() -> None:
    assert _text("forward-only", range(2), 2, recompute=True) == ["0F0 0F1", "1F0 1F1"]


def test_stages_may_lie_on_the_ranks_in_any_order() -> None:
    assert _text("gpipe", [1, 0], 1) == ["1F0 1B0", "0F0 0B0"]
    assert _text("v-min", [1, 0, 0, 1], 3) == _text("v-min", [0, 1, 1, 0], 3)[::-1]


def test_interleaved_groups_follow_megatron() -> None:
    """By hand, as Megatron-LM's forward_backward_pipelining_with_interleaving."""
    assert _text("interleaved-1f1b", [0, 1, 0, 1], 4) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"^unknown schedule 'zigzag'; choose from gpipe, 1f1b, .*forward-only$"
    ):
        generate("zigzag", range(2), 2)


def test_a_misspelt_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(
        InputError, match=r"^unknown schedule '1F1BB'; did you mean '1f1b'[?] choose from gpipe, "
    ):
        required_placement("1F1BB")


@pytest.mark.parametrize("name", NAMES)
def test_names_may_be_in_upper_case(name: str) -> None:
    shape, stages_per_rank = required_placement(name.upper())
    placement = place("loop" if shape == "any" else shape, 2, stages_per_rank or 1)
    assert generate(name.upper(), placement, 4) == generate(name, placement, 4)
    assert peak_in_flight(name.upper(), placement, 4) == peak_in_flight(name, placement, 4)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "zb-h1",
            [0, 0, 1, 1],
            "'zb-h1' needs one stage on each rank, but the stages lie on 0 0 1 1; place them so",
        ),
        (
            "1f1b",
            [0, 1, 0, 1],
            "needs the stages placed as linear, such as 0 0 1 1, but the stages lie on 0 1 0 1",
        ),
        (
            "zb-v",
            [0, 1, 2],
            "such as 0 1 2 2 1 0, but the stages lie on 0 1 2; place them so, or choose one of gp",
        ),
        (
            "dualpipe-v",
            [0, 1, 1, 0],
            "'dualpipe-v' needs at least 4 microbatches on 2 ranks, but there are 3; use more",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(
    name: str, placement: list[int], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        generate(name, placement, 3)
    assert message in str(caught.value)


def test_no_microbatch_is_too_few() -> None:
    with pytest.raises(InputError, match="needs at least 1 microbatches"):
        peak_in_flight("pipedream-2bw", range(2), 0)


def test_what_fits_a_placement_can_be_generated_there() -> None:
    assert fitting_names([0, 1, 1, 0], 3) == ("gpipe", "zb-v", "v-half", "v-min")
    assert fitting_names([0, 1, 1, 0], 4) == ("gpipe", "zb-v", "v-half", "v-min", "dualpipe-v")
    assert fitting_names([0, 1, 0, 1], 1) == ("gpipe", "interleaved-1f1b", "looped-bfs")
    assert fitting_names([0, 0, 1, 1], 1) == ("gpipe", "1f1b")
    assert fitting_names([2, 0, 1], 1) == (
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "zb-h1",
        "zb-h2",
    )
    assert fitting_names([0, 1, 0], 9) == ("gpipe",)


@st.composite
def _asked(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, tuple[int, ...], int]:
    name = draw(st.sampled_from(names))
    shape, held = required_placement(name)
    ranks, stages = draw(st.integers(1, 8)), held or draw(st.integers(1, 4))
    called = draw(st.permutations(range(ranks)))
    placement = [called[rank] for rank in place("loop" if shape == "any" else shape, ranks, stages)]
    return name, tuple(placement), draw(st.integers(2 * ranks if name == "dualpipe-v" else 1, 20))


@given(_asked(SYNCHRONOUS), st.booleans(), st.booleans())
def test_each_stage_takes_each_microbatch_once_and_in_order(
    asked: tuple[str, tuple[int, ...], int], recompute: bool, except_last: bool
) -> None:
    name, placement, microbatches = asked
    schedule = generate(*asked, recompute, except_last=except_last)
    orders: dict[tuple[int, Kind], list[int | None]] = {}
    for _, action in schedule:
        orders.setdefault((action.stage, action.kind), []).append(action.microbatch)
    every = list(range(microbatches))
    for stage in range(len(placement)):
        kinds = {kind: orders.get((stage, kind), []) for kind in Kind}
        assert kinds[Kind.FORWARD] == every
        assert all(order == sorted(order, key=every.index) for order in kinds.values())
        assert kinds[Kind.BACKWARD_INPUT] == kinds[Kind.BACKWARD_WEIGHT]
        backwards = sorted([*kinds[Kind.BACKWARD], *kinds[Kind.BACKWARD_INPUT]], key=every.index)
        assert backwards == ([] if name == "forward-only" else every)
        recomputes = (
            backwards[: len(backwards) - except_last]
            if recompute and stage < len(placement) - 1
            else []
        )
        assert kinds[Kind.RECOMPUTE] == recomputes
    if name not in SPLIT:
        assert not {kind for _, kind in orders} & {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


@given(_asked([name for name in SYNCHRONOUS if name != "forward-only"]))
def test_a_recompute_stands_right_before_its_backward(
    asked: tuple[str, tuple[int, ...], int],
) -> None:
    last = len(asked[1]) - 1
    for row in generate(*asked, True).rows:
        for before, action in zip((None, *row), row, strict=False):
            if action.kind in BACKWARDS and action.stage < last:
                assert before == action._replace(kind=Kind.RECOMPUTE)


@given(_asked(NAMES))
def test_in_flight_is_the_most_that_a_stage_holds(asked: tuple[str, tuple[int, ...], int]) -> None:
    _, placement, microbatches = asked
    assert len(peak_in_flight(*asked)) == len(placement)
    assert all(1 <= held <= microbatches for held in peak_in_flight(*asked))


@given(_asked([name for name in SYNCHRONOUS if name != "forward-only"]))
def test_the_fullest_moment_is_one_of_the_rank(asked: tuple[str, tuple[int, ...], int]) -> None:
    """No moment of a rank has more microbatches, and one has just these in its stages."""
    placement = asked[1]
    held = fullest_moment(*asked).held
    schedule = generate(*asked)
    for rank, row in enumerate(schedule.compute):
        stages = [stage for stage, other in enumerate(placement) if other == rank]
        moments = []
        for end in range(len(row) + 1):
            kinds = Counter((action.stage, action.kind) for action in row[:end])
            moments.append(
                [
                    kinds[s, Kind.FORWARD]
                    - kinds[s, Kind.BACKWARD]
                    - kinds[s, Kind.BACKWARD_WEIGHT]
                    for s in stages
                ]
            )
        assert [held[stage] for stage in stages] in moments
        assert sum(held[stage] for stage in stages) == max(map(sum, moments))


def test_stages_that_share_a_rank_hold_less_at_once_than_their_peaks() -> None:
    placement = place("loop", 4, 2)
    assert peak_in_flight("interleaved-1f1b", placement, 8) == (8, 8, 7, 5, 4, 4, 3, 1)
    assert fullest_moment("interleaved-1f1b", placement, 8).held == (7, 5, 4, 4, 4, 4, 3, 1)


def test_in_flight_of_the_schedules_whose_memory_is_published() -> None:
    """GPipe holds all, 1F1B one for each stage from here on, ZB-H1 and ZB-H2 more."""
    assert peak_in_flight("gpipe", range(4), 9) == (9, 9, 9, 9)
    assert peak_in_flight("1f1b", [2, 3, 0, 1], 9) == (4, 3, 2, 1)
    assert peak_in_flight("1f1b", [0, 0, 1, 1], 9) == (2, 2, 1, 1)
    assert peak_in_flight("zb-h1", range(4), 9) == (4, 4, 4, 4)
    assert peak_in_flight("zb-h2", range(4), 9) == (7, 7, 7, 7)
    assert peak_in_flight("1f1b", range(4), 2) == (2, 2, 2, 1)
    assert peak_in_flight("forward-only", range(4), 9) == (1, 1, 1, 1)


def test_every_name_is_generated() -> None:
    for name in NAMES:
        shape, held = required_placement(name)
        placement = place("linear" if shape == "any" else shape, 2, held or 1)
        assert generate(name, placement, 4).name == name


def test_counts_of_a_mixed_backward() -> None:
    counts = Counter(action.kind for _, action in generate("dualpipe-v", [0, 1, 1, 0], 4))
    assert counts[Kind.FORWARD] == 16
    assert counts[Kind.BACKWARD] + counts[Kind.BACKWARD_INPUT] == 16
