"""What is left open, and the settings that are tried for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.api.plan_request import PlanRequest, plan_request
from pipecompile.errors import InputError
from pipecompile.schedule.named_orders import fitting_names, fullest_moment, required_placement
from pipecompile.schedule.placement import place
from tests.sweeps import examples


def numbers(request: PlanRequest, samples: int) -> set[int]:
    tried = request.for_batch(samples).space(samples).settings()
    return {setting.microbatches for setting in tried}


@settings(max_examples=examples(100))
@given(st.integers(1, 60), st.integers(2, 8))
def test_a_batch_is_cut_whenever_it_can_be(samples: int, k: int) -> None:
    request = plan_request(k=k, costs="flops").for_batch(samples)
    number = request.options.microbatches
    assert samples % number == 0
    assert number > 1 or samples == 1
    if samples % k == 0:
        assert number == k  # the plain default, which every other plan is compared with
    tried = numbers(request, samples)
    assert number in tried
    assert len(tried) <= 3
    assert all(samples % each == 0 for each in tried)
    larger = [each for each in range(number, 4 * k + 1) if samples % each == 0]
    assert max(tried) == max(larger, default=number)


def test_a_number_of_microbatches_that_is_given_leaves_nothing_open() -> None:
    request = plan_request(k=4, microbatches=8, costs="flops", memory="1GiB")
    assert request.left_open == frozenset()
    assert not request.has_choice
    assert (request.options.schedule, request.options.recompute) == ("1f1b", "none")


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"objective": "throughput"},
        {"schedule": "pipedream"},
        {"costs": "roofline:h100,a100", "k": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_nothing_is_chosen_for_one_rank_unequal_ones_and_steps_without_a_flush(
    options: dict[str, object],
) -> None:
    assert not plan_request(**{"k": 4, "costs": "flops", **options}).has_choice


def schedules(samples: int = 16, **options: Any) -> set[tuple[str, int]]:
    request = plan_request(**{"costs": "flops", **options}).for_batch(samples)
    possible = request.space(samples).settings()
    assert request.setting in possible
    assert {each.ranks for each in possible} == {4}
    return {(each.schedule, each.stages_per_rank) for each in possible}


def test_without_a_cap_schedules_hold_no_more_microbatches_than_1f1b() -> None:
    assert schedules(k=4) == {("1f1b", 1), ("zb-h1", 1)}
    v_shaped = {(name, 2) for name in ("zb-v", "v-half", "v-min")}
    assert schedules(ranks=4) == schedules(k=4) | v_shaped
    for name, each in schedules(ranks=4):
        for number in (4, 8, 16):
            shape, _ = required_placement(name)
            placement = place(shape, 4, each)
            held = fullest_moment(name, placement, number).held
            by_rank = Counter[int]()
            for stage, rank in enumerate(placement):
                by_rank[rank] += held[stage]
            most = max(fullest_moment("1f1b", range(4), number).held)
            # Of a stage with half of the nodes a microbatch is half as much.
            assert max(by_rank.values()) <= each * most


def test_under_a_cap_all_named_schedules_are_open() -> None:
    one_each = {("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("gpipe", 1)}
    assert schedules(k=4, memory="1GiB") == one_each
    several = [
        (name, 2)
        for shape in ("loop", "v")
        for name in fitting_names(place(shape, 4, 2), 16)
        if name != "gpipe"  # of any placement: it is tried on the simplest one
    ]
    assert schedules(ranks=4, memory="1GiB") == one_each.union(several)


def test_stages_that_are_counted_are_kept() -> None:
    two_each = ({"k": 8, "stages_per_rank": 2}, {"ranks": 4, "stages_per_rank": 2})
    for options in (*two_each, {"k": 8, "ranks": 4}):
        assert {each for _, each in schedules(**options, memory="1GiB")} == {2}
    for options in ({"k": 4, "ranks": 4}, {"ranks": 4, "pin": {"node": 3}}):
        assert {each for _, each in schedules(**options, memory="1GiB")} == {1}


@pytest.mark.parametrize("each", [2, 3, 4])
def test_interleaving_is_tried_without_a_cap_where_several_stages_lie_on_each_rank(
    each: int,
) -> None:
    assert ("interleaved-1f1b", each) in schedules(k=4 * each, ranks=4)
    for number in (4, 8, 16):
        most = dict[str, int]()
        for name, shape in (("1f1b", "linear"), ("interleaved-1f1b", "loop")):
            placement = place(shape, 4, each)
            held, by_rank = fullest_moment(name, placement, number).held, Counter[int]()
            for stage, rank in enumerate(placement):
                by_rank[rank] += held[stage]
            most[name] = max(by_rank.values())
        # A microbatch of one stage each: with `each` stages on a rank that is a part of one.
        assert most["interleaved-1f1b"] <= most["1f1b"] + 3


def test_k_says_how_many_stages_lie_on_each_of_the_ranks_where_the_schedule_takes_any() -> None:
    for schedule in (None, "search", "interleaved-1f1b"):
        options = plan_request(k=12, ranks=4, costs="flops", schedule=schedule).options
        assert (options.k, options.stages_per_rank) == (12, 3)
    for k, schedule in ((9, None), (12, "1f1b"), (12, "zb-v")):
        with pytest.raises(InputError, match=f"k={k} and ranks=4 disagree"):
            plan_request(k=k, ranks=4, costs="flops", schedule=schedule)


def test_what_is_given_is_kept_and_recompute_is_open_under_a_cap_only() -> None:
    free = plan_request(k=4, costs="flops").space(16).settings()
    assert {each.recompute for each in free} == {"none"}
    request = plan_request(k=4, costs="flops", memory="1GiB", schedule="gpipe", replicas=2)
    possible = request.for_batch(16).space(16).settings()
    assert {each.schedule for each in possible} == {"gpipe"}
    assert {each.recompute for each in possible} == {"none", "auto", "stage"}
    assert {(each.replicas, each.ranks) for each in possible} == {(2, 4)}
    assert request.for_batch(16).setting in possible
