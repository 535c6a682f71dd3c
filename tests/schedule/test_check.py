from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.ir.schedule import Action, Schedule
from pipecompile.schedule.check import check
from tests.schedule.cases import equal

Lowered = Callable[..., Schedule]


def _with_row(schedule: Schedule, rank: int, row: list[str]) -> Schedule:
    rows = [row if index == rank else list(old) for index, old in enumerate(schedule.actions)]
    return _schedule(rows, schedule.microbatches)


def _schedule(rows: list[list[str]], microbatches: int) -> Schedule:
    return Schedule.of(
        "planted", microbatches, range(len(rows)), [[Action.parse(text) for text in row] for row in rows]
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
    assert message in check(_without(lowered("1f1b", 3, 3), missing))


def test_what_is_there_twice_or_out_of_place_is_named(lowered: Lowered) -> None:
    sound = lowered("1f1b", 2, 2)
    assert check(_with_row(sound, 1, [*sound.actions[1], "1F0"])) == ["rank 1: 1F0 appears 2 times"]
    assert check(_with_row(sound, 1, [*sound.actions[1], "1SEND_F0"])) == ["rank 1: 1SEND_F0 to rank ? is out of place"]
    assert check(_with_row(sound, 1, [*sound.actions[1], "1I0"])) == [
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
def test_what_comes_too_early_is_named(lowered: Lowered, rank: int, one: str, other: str, message: str) -> None:
    assert message in check(_swapped(lowered("gpipe", 2, 2, True), rank, one, other))


def test_the_last_stage_takes_its_microbatches_in_order() -> None:
    rows = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F1", "1F0"]]
    message = "rank 1: 1F0 comes after 1F1, but the last stage takes its microbatches in order"
    assert check(_schedule(rows, 2)) == [message]


def test_crossed_receives_are_named_although_nothing_hangs_when_sends_are_buffered(lowered: Lowered) -> None:
    found = check(_swapped(lowered("gpipe", 2, 2), 1, "1RECV_F0", "1RECV_F1"))
    assert found[0] == "rank 1: 1RECV_F1 from rank 0 would get the data of 0SEND_F0: sends and receives cross"
    assert len(found) == 2
    assert found[1].startswith("deadlock if sends wait for their receives: rank 0 stops at 0SEND_F0")


def test_a_deadlock_under_rendezvous_is_named() -> None:
    """Both ranks send before they receive: it runs only where sends are buffered (as pytorch#172668)."""
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1", "0REDUCE_GRAD"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "1REDUCE_GRAD"],
    ]
    (found,) = check(_schedule(rows, 2))
    assert found.startswith("deadlock if sends wait for their receives: rank 0 stops at 0SEND_F1")
    assert "rank 1 stops at 1SEND_B0" in found


def test_a_deadlock_with_buffered_sends_is_named() -> None:
    rows = [
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1", "0REDUCE_GRAD"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1", "1REDUCE_GRAD"],
    ]
    strict, buffered = check(_schedule(rows, 2))
    assert strict.startswith("deadlock if sends wait")
    assert buffered == (
        "deadlock even if sends are buffered: "
        "rank 0 stops at 0RECV_B0 until 1SEND_B0 is done; rank 1 stops at 1RECV_F1 until 0SEND_F1 is done"
    )


def test_without_the_flags_a_silent_boundary_counts_as_having_no_gradient(lowered: Lowered) -> None:
    sound = lowered("gpipe", 2, 1)
    silent = _without(_without(sound, "0RECV_B0"), "1SEND_B0")
    assert check(silent) == []
    assert check(silent, equal([0, 1], 1)) == [
        "rank 0: 0RECV_B0 from rank 1 is missing",
        "rank 1: 1SEND_B0 to rank 0 is missing",
    ]
