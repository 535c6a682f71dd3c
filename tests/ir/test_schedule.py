from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import FormatError
from pipecompile.ir.schedule import Action, Event, Idle, Kind, Schedule, Timeline
from pipecompile.ir.serialization import decode, encode


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
def test_an_action_is_read_as_it_is_written(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, None if kind is Kind.REDUCE else microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X1", "0REDUCE_GRAD1", "0F0 ", "-1F0", "0SEND_F"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action such as '0F2'"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("placement", "actions", "message"),
    [
        ([], [["0F0"]], r"placement \[\] does not fit 1 ranks"),
        ([0, 1], [["0F0"]], r"placement \[0, 1\] does not fit 1 ranks"),
        ([0], [["1F0"]], "rank 0 performs 1F0, but its stage is not placed there"),
        ([0, 1], [["1F0"], []], "rank 0 performs 1F0, but its stage is not placed there"),
        ([0], [["0F2"]], "rank 0 performs 0F2, but there are 2 microbatches"),
        ([0], [["0Z0"]], "'0Z0' is not an action"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    placement: list[int], actions: list[list[str]], message: str
) -> None:
    rows = tuple(map(tuple, actions))
    with pytest.raises(ValueError, match=message):
        Schedule(name="x", microbatches=2, placement=tuple(placement), actions=rows)


def test_a_damaged_file_is_answered_with_its_name_and_the_reason() -> None:
    sound = Schedule(name="x", microbatches=1, placement=(0,), actions=(("0F0",),))
    with pytest.raises(FormatError, match=r"plan\.json: .*'0Z0' is not an action"):
        decode(encode(sound).replace(b"0F0", b"0Z0"), Schedule, origin="plan.json")


def test_compute_leaves_out_transfers_and_reductions() -> None:
    schedule = Schedule(
        name="x",
        microbatches=1,
        placement=(0, 1),
        actions=(("0F0", "0SEND_F0", "0REDUCE_GRAD"), ("1RECV_F0", "1F0")),
    )
    assert schedule.compute == ((Action(0, Kind.FORWARD, 0),), (Action(1, Kind.FORWARD, 0),))
    assert schedule.ranks == 2


def test_the_figures_of_a_timeline() -> None:
    forward = Action(0, Kind.FORWARD, 0)
    rows = ((Event(forward, 0, 4), Event(forward, 6, 10)), (Event(forward, 5, 7),))
    timeline = Timeline(
        rows, (Idle(dependency_ns=2, transfer_ns=0), Idle(dependency_ns=8, transfer_ns=0))
    )
    assert (timeline.makespan_ns, timeline.span_ns, timeline.busy_ns) == (10, 10, (8, 2))
    assert timeline.bubble == 0.5
    assert Timeline((), ()).bubble == 0.0


def test_what_is_taken_is_there_from_the_start_and_what_is_freed_until_the_end() -> None:
    events = tuple(
        Event(Action.parse(text), 10 * i, 10 * i + 10)
        for i, text in enumerate(("0F0", "0R0", "0I0", "0W0"))
    )
    timeline = Timeline((events,), (), held_bytes=((3, 8, 5, 0),))
    assert timeline.memory(0) == ((0, 3), (10, 8), (30, 5), (40, 0))
    assert timeline.peak_bytes == (8,)


def test_a_step_ends_with_its_last_reduction() -> None:
    row = (Event(Action.parse("0F0"), 0, 4),)
    timeline = Timeline((row,), (), reductions=((Event(Action.parse("0REDUCE_GRAD"), 4, 9),),))
    assert (timeline.makespan_ns, timeline.span_ns, timeline.busy_ns) == (9, 4, (4,))


def test_idle_time_is_the_sum_of_its_causes() -> None:
    assert Idle(dependency_ns=1, transfer_ns=2, memory_ns=4, imbalance_ns=8).total_ns == 15
