"""How many gradients may be unread, by hand and against sets of all that happens before a send."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule
from pipecompile.memory_model.unread_gradients import unread_gradients
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.receives import add_earliest_receives
from tests.schedule.test_receives import past_of, schedules


def _unread_by_sets(schedule: Schedule, stage: int) -> Iterator[tuple[int | None, int]]:
    """Yield each microbatch with the gradients from the first unread one on, as it is sent."""
    row = schedule.compute[schedule.placement[stage]]
    sent = [action for action in row if action.kind in BACKWARDS and action.stage == stage]
    for index, action in enumerate(sent):
        past = past_of(schedule, action)
        read = [
            any(Action(stage - 1, kind, other.microbatch) in past for kind in BACKWARDS)
            for other in sent[:index]
        ]
        first = read.index(False) if False in read else index
        yield action.microbatch, index - first + 1


@given(schedules())
def test_they_are_those_that_no_message_tells_of(schedule: Schedule) -> None:
    placement = schedule.placement
    trains = any(action.kind in BACKWARDS for _, action in schedule)
    sending = [s for s in range(1, len(placement)) if trains and placement[s] != placement[s - 1]]
    wanted = {
        (stage, microbatch): count
        for stage in sending
        for microbatch, count in _unread_by_sets(schedule, stage)
    }
    assert unread_gradients(schedule) == wanted
    assert unread_gradients(add_earliest_receives(schedule)) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # No forward follows the last three backwards of stage 1, nor the last of stage 3.
        ("1f1b", {1: [1, 2, 2, 2, 3, 4], 2: [1, 2, 2, 2, 2, 3], 3: [1, 2, 2, 2, 2, 2]}),
        ("gpipe", {stage: [1, 2, 3, 4, 5, 6] for stage in (1, 2, 3)}),
    ],
)
def test_one_forward_and_one_backward_in_turns_tell_of_all_but_two(
    name: str, wanted: dict[int, list[int]]
) -> None:
    unread = unread_gradients(generate(name, range(4), 6))
    assert {s: [unread[s, m] for m in range(6)] for s in (1, 2, 3)} == wanted


@pytest.mark.parametrize(
    ("name", "shape"),
    [("1f1b", "linear"), ("zb-h1", "linear"), ("interleaved-1f1b", "loop"), ("zb-v", "v")],
)
def test_they_are_no_more_with_more_microbatches(name: str, shape: str) -> None:
    placement = place(shape, 4, 1 if shape == "linear" else 2)
    few, many = (unread_gradients(generate(name, placement, count)) for count in (16, 64))
    assert max(few.values()) == max(many.values()) < 16


def test_a_gradient_that_is_not_received_is_not_sent() -> None:
    row = ("0F0", "0B0"), ("1RECV_F0", "1F0", "1B0")
    schedule = Schedule(name="frozen", microbatches=1, placement=(0, 1), actions=row)
    assert Kind.RECEIVE_BACKWARD not in {action.kind for _, action in schedule}
    assert unread_gradients(schedule) == {}
