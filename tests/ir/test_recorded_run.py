"""Recorded runs: their files, and their steps as timelines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipecompile.errors import FormatError
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedAction, RecordedRank, RecordedRun, RecordedStep
from pipecompile.ir.schedule import Action, Event
from pipecompile.ir.serialization import decode, encode

# Rank 0 sends what its forward made; rank 1 waits for it until 40, and its step lasts until 100.
FIRST = RecordedRank(
    start_ns=0,
    end_ns=95,
    actions=(
        RecordedAction("0F0", 5, 5, 25, 0, 800),
        RecordedAction("0SEND_F0", 26, 26, 30, 64, 900),
        RecordedAction("0RECV_B0", 31, 31, 32, 64, 700),
        RecordedAction("0B0", 33, 70, 90, 0, 850),
    ),
)
SECOND = RecordedRank(
    start_ns=2,
    end_ns=100,
    actions=(
        RecordedAction("1RECV_F0", 3, 3, 4, 64),
        RecordedAction("1F0", 4, 40, 50),
        RecordedAction("1B0", 51, 51, 60),
        RecordedAction("1SEND_B0", 61, 61, 66, 64),
    ),
)
STEP = RecordedStep(number=7, microbatches=1, microbatch_shapes=((2, 3),), ranks=(FIRST, SECOND))
RUN = RecordedRun(
    plan="0" * 64, device="cpu", torch="2.0", processes=2, clock_error_ns=3, steps=(STEP,)
)


def event(action: str, start_ns: int, end_ns: int) -> Event:
    return Event(Action.parse(action), start_ns, end_ns)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    assert RecordedRun.load(tmp_path / "run.json") == RUN
    assert encode(RUN) == (tmp_path / "run.json").read_bytes()


def test_a_step_is_a_timeline_of_the_simulators_kind() -> None:
    timeline = STEP.timeline()
    assert timeline.events == (
        (event("0F0", 5, 30), event("0B0", 70, 90)),
        (event("1F0", 40, 50), event("1B0", 51, 66)),
    )
    assert timeline.reductions == (
        (event("0REDUCE_GRAD", 90, 95),),
        (event("1REDUCE_GRAD", 66, 100),),
    )
    assert timeline.makespan_ns == 100
    assert STEP.ns == 97  # the second rank's first action could begin at 3
    assert timeline.busy_ns == (45, 25)


def test_a_rank_knows_how_long_it_waited_and_what_it_held() -> None:
    assert (FIRST.waiting_ns, SECOND.waiting_ns) == (37, 36)
    assert (FIRST.peak_bytes, SECOND.peak_bytes) == (900, None)
    assert FIRST.actions[3].work_ns == 20


def test_a_rank_without_actions_is_drawn_empty() -> None:
    idle = RecordedRank(start_ns=0, end_ns=9, actions=())
    timeline = msgspec.structs.replace(STEP, ranks=(FIRST, idle)).timeline()
    assert (timeline.events[1], timeline.reductions[1]) == ((), ())


def test_one_process_may_have_performed_the_actions_of_all_ranks() -> None:
    assert (RUN.ranks, RUN.is_in_turns) == (2, False)
    assert msgspec.structs.replace(RUN, processes=1).is_in_turns


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"0B0", 33, 70, 90', b'"0B0", 33, 20, 90', r"the times of 0B0 are not in order"),
        (b'"0B0", 33', b'"0X0", 33', "'0X0' is not an action"),
        (b'"0B0", 33', b'"0B0", -1', r"`\$\.steps\[0\]\.ranks\[0\]\.actions\[3\]\[1\]`"),
        (b'"processes": 2', b'"processes": 0', r"`\$\.processes`"),
        (b'"torch"', b'"pytorch"', "unknown field `pytorch`"),
        (b"pipecompile/run/1", b"pipecompile/run/2", "written by a newer pipecompile"),
    ],
)
def test_a_damaged_file_is_answered_with_the_place(old: bytes, new: bytes, message: str) -> None:
    data = encode(RUN)
    assert old in data
    with pytest.raises(FormatError, match=message):
        decode(data.replace(old, new), RecordedRun, origin="run.json")


def test_steps_are_on_the_same_ranks() -> None:
    with pytest.raises(ValueError, match="it has 0 steps"):
        msgspec.structs.replace(RUN, steps=())
    other = msgspec.structs.replace(STEP, ranks=(FIRST,))
    with pytest.raises(ValueError, match=r"2 steps on \[1, 2\] ranks"):
        msgspec.structs.replace(RUN, steps=(STEP, other))


def test_a_run_is_not_taken_for_a_plan() -> None:
    with pytest.raises(FormatError, match=r"is a run \(.+\), but a plan is expected"):
        decode(encode(RUN), Plan, origin="run.json")


def test_a_step_lasts_from_the_first_action_that_could_begin() -> None:
    """The last rank enters it while the first one still ends the step before, and waits for it."""
    early = RecordedAction("1RECV_F0", 0, 300, 304)
    ranks = tuple(
        RecordedRank(start_ns=start, end_ns=end, actions=(action,))
        for start, end, action in (
            (300, 900, RecordedAction("0F0", 302, 302, 400)),
            (0, 850, early),
        )
    )
    assert ranks[1].waiting_ns == 300
    assert msgspec.structs.replace(STEP, ranks=ranks).ns == 900 - 300
