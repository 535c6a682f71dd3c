from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.schedule import Action, Kind, Schedule, WeightVersions
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.problem import StageCosts
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal, order
from tests.schedule.strategies import orders, problems

Lowered = Callable[..., Schedule]


def _with_row(schedule: Schedule, rank: int, row: list[str]) -> Schedule:
    rows = [row if index == rank else list(old) for index, old in enumerate(schedule.actions)]
    return _schedule(rows, schedule.microbatches)


def _schedule(rows: list[list[str]], microbatches: int) -> Schedule:
    return Schedule.of(
        "planted",
        microbatches,
        range(len(rows)),
        [[Action.parse(text) for text in row] for row in rows],
    )


def _without(schedule: Schedule, text: str) -> Schedule:
    rank = next(rank for rank, row in enumerate(schedule.actions) if text in row)
    return _with_row(schedule, rank, [other for other in schedule.actions[rank] if other != text])


def _swapped(schedule: Schedule, rank: int, one: str, other: str) -> Schedule:
    exchange = {one: other, other: one}
    return _with_row(schedule, rank, [exchange.get(text, text) for text in schedule.actions[rank]])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("1F1", "rank 1: 1F1 is missing"),
        ("1B1", "rank 1: 1B1 is missing"),
        ("0REDUCE_GRAD", "rank 0: 0REDUCE_GRAD is missing"),
        ("0SEND_F1", "rank 0: 0SEND_F1 to rank 1 is missing"),
        ("2RECV_F0", "rank 2: 2RECV_F0 from rank 1 is missing"),
        ("1SEND_B2", "rank 1: 1SEND_B2 to rank 0 is missing"),
        ("1RECV_B2", "rank 1: 1RECV_B2 from rank 2 is missing"),
    ],
)
def test_what_is_missing_is_named(lowered: Lowered, missing: str, message: str) -> None:
    assert message in check_schedule(_without(lowered("1f1b", 3, 3), missing))


def test_what_is_there_twice_or_out_of_place_is_named(lowered: Lowered) -> None:
    sound = lowered("1f1b", 2, 2)
    assert check_schedule(_with_row(sound, 1, [*sound.actions[1], "1F0"])) == [
        "rank 1: 1F0 appears 2 times"
    ]
    assert check_schedule(_with_row(sound, 1, [*sound.actions[1], "1SEND_F0"])) == [
        "rank 1: 1SEND_F0 to rank ? is out of place"
    ]
    assert check_schedule(_with_row(sound, 1, [*sound.actions[1], "1I0"])) == [
        "rank 1: 1B0 is out of place",
        "rank 1: 1W0 is missing",
    ]


@pytest.mark.parametrize(
    ("rank", "one", "other", "message"),
    [
        (1, "1F0", "1B0", "rank 1: 1B0 stands before 1F0, which it needs"),
        (1, "1RECV_F0", "1F0", "rank 1: 1F0 stands before 1RECV_F0, which it needs"),
        (0, "0SEND_F0", "0F0", "rank 0: 0SEND_F0 to rank 1 stands before 0F0, which it needs"),
        (0, "0RECV_B0", "0B0", "rank 0: 0B0 stands before 0RECV_B0, which it needs"),
        (0, "0R0", "0B0", "rank 0: 0B0 stands before 0R0, which it needs"),
        (1, "1B1", "1REDUCE_GRAD", "rank 1: 1REDUCE_GRAD stands before 1B1, which it needs"),
    ],
)
def test_what_comes_too_early_is_named(
    lowered: Lowered, rank: int, one: str, other: str, message: str
) -> None:
    assert message in check_schedule(_swapped(lowered("gpipe", 2, 2, True), rank, one, other))


def test_the_last_stage_takes_its_microbatches_in_order() -> None:
    rows = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F1", "1F0"]]
    message = "rank 1: 1F0 comes after 1F1, but the last stage takes its microbatches in order"
    assert check_schedule(_schedule(rows, 2)) == [message]


def test_crossed_receives_are_named_although_nothing_hangs_when_sends_are_buffered(
    lowered: Lowered,
) -> None:
    found = check_schedule(_swapped(lowered("gpipe", 2, 2), 1, "1RECV_F0", "1RECV_F1"))
    assert (
        found[0]
        == "rank 1: 1RECV_F1 from rank 0 would get the data of 0SEND_F0: sends and receives cross"
    )
    assert len(found) == 2
    assert found[1].startswith(
        "deadlock if sends wait for their receives: rank 0 stops at 0SEND_F0"
    )


def test_a_deadlock_under_rendezvous_is_named() -> None:
    """Both ranks send before they receive: this needs buffered sends (as pytorch#172668)."""
    rows = [
        [
            "0F0",
            "0SEND_F0",
            "0F1",
            "0SEND_F1",
            "0RECV_B0",
            "0B0",
            "0RECV_B1",
            "0B1",
            "0REDUCE_GRAD",
        ],
        [
            "1RECV_F0",
            "1F0",
            "1B0",
            "1SEND_B0",
            "1RECV_F1",
            "1F1",
            "1B1",
            "1SEND_B1",
            "1REDUCE_GRAD",
        ],
    ]
    (found,) = check_schedule(_schedule(rows, 2))
    assert found.startswith("deadlock if sends wait for their receives: rank 0 stops at 0SEND_F1")
    assert "rank 1 stops at 1SEND_B0" in found


def test_a_deadlock_with_buffered_sends_is_named() -> None:
    rows = [
        [
            "0F0",
            "0SEND_F0",
            "0RECV_B0",
            "0B0",
            "0F1",
            "0SEND_F1",
            "0RECV_B1",
            "0B1",
            "0REDUCE_GRAD",
        ],
        [
            "1RECV_F0",
            "1F0",
            "1RECV_F1",
            "1F1",
            "1B0",
            "1SEND_B0",
            "1B1",
            "1SEND_B1",
            "1REDUCE_GRAD",
        ],
    ]
    strict, buffered = check_schedule(_schedule(rows, 2))
    assert strict.startswith("deadlock if sends wait")
    assert buffered == (
        "deadlock even if sends are buffered: "
        "rank 0 stops at 0RECV_B0 until 1SEND_B0 is done; "
        "rank 1 stops at 1RECV_F1 until 0SEND_F1 is done"
    )


def test_without_the_flags_a_silent_boundary_counts_as_having_no_gradient(lowered: Lowered) -> None:
    sound = lowered("gpipe", 2, 1)
    silent = _without(_without(sound, "0RECV_B0"), "1SEND_B0")
    assert check_schedule(silent) == []
    assert check_schedule(silent, equal([0, 1], 1)) == [
        "rank 0: 0RECV_B0 from rank 1 is missing",
        "rank 1: 1SEND_B0 to rank 0 is missing",
    ]


def test_another_problem_is_named(lowered: Lowered) -> None:
    (found,) = check_schedule(lowered("gpipe", 2, 1), equal([0, 1], 2))
    assert (
        found
        == "the schedule has another placement or another number of microbatches than its problem"
    )


def test_an_order_over_its_cap_is_named_with_the_action_and_the_excess(lowered: Lowered) -> None:
    costs = (StageCosts(1, 1, kept_bytes=10),) * 2
    problem = equal([0, 1], 3, costs=costs, caps=(30, 25))
    assert check_schedule(lowered("gpipe", 2, 3), problem) == [
        "rank 1: from 1F2 on it holds up to 30 B, 5 B over its cap of 25 B",
    ]
    assert check_schedule(lowered("1f1b", 2, 3), problem) == []


def test_a_recompute_that_the_memory_counts_on_is_missed(lowered: Lowered) -> None:
    costs = (StageCosts(1, 1, recompute=True, recomputed_bytes=1), StageCosts(1, 1))
    problem = equal([0, 1], 1, costs=costs)
    assert check_schedule(lowered("1f1b", 2, 1), problem) == ["rank 0: 0R0 is missing"]
    assert check_schedule(lowered("1f1b", 2, 1, recompute=True), problem) == []


@pytest.mark.parametrize("kinds", ["B", "W"])
def test_gradients_summed_in_another_order_are_named(kinds: str) -> None:
    rows = {"B": "0F0 0F1 0B1 0B0", "W": "0F0 0F1 0I0 0I1 0W1 0W0"}
    (found,) = check_schedule(order([f"{rows[kinds]} 0REDUCE_GRAD"], [0], 2))
    assert found == (
        f"rank 0: 0{kinds}0 comes after 0{kinds}1, "
        "but a stage sums its gradients in the order of the microbatches"
    )


def test_a_reduction_before_the_last_gradient_is_named() -> None:
    (found,) = check_schedule(order(["0F0 0I0 0REDUCE_GRAD 0W0"], [0], 1))
    assert found == "rank 0: 0REDUCE_GRAD stands before 0W0, which it needs"


def test_optimizer_steps_are_the_training_loops_where_all_step_together() -> None:
    assert check_schedule(order(["0F0 0B0 0REDUCE_GRAD 0STEP"], [0], 1)) == [
        "rank 0: 0STEP is out of place"
    ]
    assert check_schedule(order(["0F0 0B0 0REDUCE_GRAD 0STEP0"], [0], 1)) == [
        "rank 0: 0STEP0 is out of place"
    ]


def _asynchronous(rows: list[str], rule: WeightVersions) -> Schedule:
    return add_transfers(equal([0, 1], 3), order(rows, [0, 1], 3, rule))


PIPEDREAM = [
    "0F0@0 0F1@0 0B0@0 0STEP0@1 0F2@1 0B1@0 0STEP1@2 0B2@1 0STEP2@3",
    "1F0@0 1B0@0 1STEP0@1 1F1@1 1B1@1 1STEP1@2 1F2@2 1B2@2 1STEP2@3",
]


def test_versions_that_follow_their_rule_are_sound() -> None:
    assert check_schedule(_asynchronous(PIPEDREAM, "stashed")) == []


@pytest.mark.parametrize(
    ("right", "wrong", "messages"),
    [
        (
            "0F2@1",
            "0F2@2",
            [
                "0F2@2 uses version 2 before a step of stage 0 has made it",
                "0B2@1 uses another version",
            ],
        ),
        ("0B1@0", "0B1@1", ["0B1@1 uses another version than its forward 0F1@0"]),
        (
            "0F0@0",
            "0F0",
            ["0F0 names no version of the weights, such as 0F0@0", "0B0@0 uses another version"],
        ),
        ("0STEP1@2", "0STEP1@1", ["0STEP1@1 makes version 1, but the next one is 2"]),
    ],
)
def test_a_wrong_version_is_named(right: str, wrong: str, messages: list[str]) -> None:
    found = check_schedule(
        _asynchronous([row.replace(right, wrong) for row in PIPEDREAM], "stashed")
    )
    assert len(found) == len(messages)
    assert all(
        line.startswith(f"rank 0: {message}") for line, message in zip(found, messages, strict=True)
    )


def test_old_weights_and_gradients_without_a_step_are_named() -> None:
    stale = [row.replace("0F2@1", "0F2@0").replace("0B2@1", "0B2@0") for row in PIPEDREAM]
    assert check_schedule(_asynchronous(stale, "stashed")) == [
        "rank 0: 0F2@0 does not use version 1, the newest of its stage"
    ]
    unused = [row.replace(" 0STEP2@3", "") for row in PIPEDREAM]
    assert check_schedule(_asynchronous(unused, "stashed")) == ["rank 0: no step comes after 0B2@1"]


@pytest.mark.parametrize("microbatches", [2, 5, 8])
def test_two_buffers_are_the_weights_before_the_last_update(microbatches: int) -> None:
    problem = equal([0, 1], microbatches)
    sound = add_transfers(problem, generate("pipedream-2bw", [0, 1], microbatches))
    assert check_schedule(sound, problem) == []
    rows = [
        [a._replace(version=0) if a.version and a.kind is not Kind.STEP else a for a in r]
        for r in sound.rows
    ]
    stale = Schedule.of("x", microbatches, [0, 1], rows, "double-buffered")
    assert bool(check_schedule(stale, problem)) == any(
        a.version for _, a in sound if a.kind is Kind.FORWARD
    )
    unversioned = [[action for action in row if action.kind is not Kind.STEP] for row in sound.rows]
    assert any(
        "no step comes after" in line
        for line in check_schedule(
            Schedule.of("x", microbatches, [0, 1], unversioned, "double-buffered")
        )
    )


def test_an_evaluation_holds_one_forward_at_a_time() -> None:
    problem = replace(equal([0, 1], 4), caps=(1, 1))
    problem = replace(problem, costs=tuple(replace(w, kept_bytes=1) for w in problem.costs))
    evaluation = add_transfers(problem, generate("forward-only", [0, 1], 4))
    assert check_schedule(evaluation, problem) == []
    assert simulate(problem, evaluation).peak_bytes == (1, 1)


def test_another_version_than_on_the_first_stage_is_named_under_vertical_sync() -> None:
    assert check_schedule(_asynchronous(PIPEDREAM, "vertical-sync")) == [
        "rank 1: 1F1@1 uses another version than 0F1@0 on rank 0",
        "rank 1: 1F2@2 uses another version than 0F2@1 on rank 0",
    ]


def test_versions_have_no_place_where_all_step_together() -> None:
    found = check_schedule(order(["0F0@1 0B0 0REDUCE_GRAD"], [0], 1))
    assert found == ["rank 0: 0F0@1 names a version, but all of a step see the same weights"]


@given(st.data())
def test_any_order_of_any_problem_is_sound_once_it_is_lowered(data: st.DataObject) -> None:
    """For all times and placements; a rank over its cap is the only violation."""
    problem = data.draw(problems(skips=False))
    schedule = data.draw(orders(problem, tidy=True))
    timeline = simulate(problem, schedule)
    over = []
    for rank, (row, cap) in enumerate(zip(schedule.rows, problem.caps or (), strict=False)):
        held = zip(row, timeline.held_bytes[rank], strict=True)
        first = next((action for action, size in held if size > cap), None)
        if first is not None:
            over.append(f"rank {rank}: from {first} on")
    found = check_schedule(add_transfers(problem, schedule), problem)
    assert [line[: line.index(" it holds")] for line in found] == over
    if all(problem.gradient) and not over:
        assert check_schedule(add_transfers(problem, schedule)) == []
