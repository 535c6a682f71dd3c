from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import generate
from pipecompile.schedule.simulate import simulate


def _naive_ends(
    schedule: Schedule, durations: dict[Action, int], hops: dict[tuple[int, int], int]
) -> dict[Action, int]:
    """Times as the least solution of their equations, found by sweeping until nothing moves."""
    last = len(schedule.placement) - 1
    ends = dict.fromkeys(durations, 0)
    while True:
        before = dict(ends)
        for row in schedule.compute:
            clock = 0
            for action in row:
                stage, number = action.stage, action.microbatch
                starts = [clock]
                if action.kind is Kind.FORWARD and stage:
                    starts.append(ends[Action(stage - 1, Kind.FORWARD, number)] + hops[stage - 1, stage])
                if action.kind is Kind.BACKWARD and stage < last:
                    starts.append(ends[Action(stage + 1, Kind.BACKWARD, number)] + hops[stage + 1, stage])
                clock = ends[action] = max(starts) + durations[action]
        if ends == before:
            return ends


@given(
    st.sampled_from(["gpipe", "1f1b", "forward-only"]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(),
)
def test_a_naive_simulator_agrees(
    name: str, stages: int, microbatches: int, recompute: bool, rng: random.Random
) -> None:
    schedule = generate(name, range(stages), microbatches, recompute)
    durations = {action: rng.randrange(20) for _, action in schedule}
    hops = {(a, b): rng.randrange(9) for a in range(stages) for b in (a - 1, a + 1)}
    gradient = [True] * (stages - 1)
    timeline = simulate(schedule, durations.__getitem__, lambda a, b: hops[a, b], gradient)
    ends = {event.action: event.end_ns for row in timeline.events for event in row}
    assert ends == _naive_ends(schedule, durations, hops)
    for row, idle in zip(timeline.events, timeline.idle, strict=True):
        busy = sum(event.end_ns - event.start_ns for event in row)
        assert busy + idle.dependency_ns + idle.transfer_ns == timeline.makespan_ns
    lowered = lower(schedule, timeline, gradient)
    assert simulate(lowered, durations.__getitem__, lambda a, b: hops[a, b], gradient) == timeline


def test_idle_time_is_told_apart_by_cause() -> None:
    schedule = generate("gpipe", range(2), 1, False)
    timeline = simulate(schedule, lambda _: 10, lambda *_: 3, [True])
    assert timeline.makespan_ns == 46
    assert [(idle.transfer_ns, idle.dependency_ns) for idle in timeline.idle] == [(3, 23), (3, 23)]


def test_recomputation_fills_the_wait_for_the_gradient() -> None:
    plain = simulate(generate("gpipe", range(2), 1, False), lambda _: 10, lambda *_: 0, [True])
    again = simulate(generate("gpipe", range(2), 1, True), lambda _: 10, lambda *_: 0, [True])
    assert again.makespan_ns == plain.makespan_ns
    assert again.events[0][1].start_ns == 10


def test_without_a_gradient_a_backward_does_not_wait() -> None:
    schedule = generate("gpipe", range(2), 1, False)
    timeline = simulate(schedule, lambda _: 10, lambda *_: 3, [False])
    assert timeline.events[0][1].start_ns == 10


def test_weight_gradients_follow_input_gradients_and_release_nobody() -> None:
    rows = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    schedule = Schedule.of("split", 1, [0, 1], [[Action.parse(text) for text in row] for row in rows])
    timeline = simulate(schedule, lambda _: 10, lambda *_: 0, [True])
    assert [event.start_ns for event in timeline.events[0]] == [0, 30, 40]


def test_stages_on_one_rank_transfer_nothing() -> None:
    schedule = Schedule.of("one rank", 1, [0, 0], [list(map(Action.parse, ["0F0", "1F0", "1B0", "0B0"]))])
    assert simulate(schedule, lambda _: 10, lambda *_: 99, [True]).makespan_ns == 40


def test_a_deadlock_names_what_every_rank_waits_for() -> None:
    rows = [["0B0", "0F0"], ["1F0", "1B0"]]
    schedule = Schedule.of("stuck", 1, [0, 1], [[Action.parse(text) for text in row] for row in rows])
    with pytest.raises(ScheduleError, match="rank 0 stops at 0B0 until 0F0 is done; rank 1 stops at 1F0 until 0F0"):
        simulate(schedule, lambda _: 1, lambda *_: 0, [True])
