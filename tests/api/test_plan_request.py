"""What is left open, and the settings that are tried for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.api.plan_request import PlanRequest, plan_request
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


def test_what_is_given_is_kept_and_recompute_is_open_under_a_cap_only() -> None:
    free = plan_request(k=4, costs="flops").space(16).settings()
    assert {each.schedule for each in free} == {"1f1b", "zb-h1"}
    assert {each.recompute for each in free} == {"none"}
    request = plan_request(k=4, costs="flops", memory="1GiB", schedule="gpipe", replicas=2)
    possible = request.for_batch(16).space(16).settings()
    assert {each.schedule for each in possible} == {"gpipe"}
    assert {each.recompute for each in possible} == {"none", "auto"}
    assert {(each.replicas, each.ranks) for each in possible} == {(2, 4)}
    assert request.for_batch(16).setting in possible
