"""Orders in which ranks take the microbatches of a stage in turns (PipeDream's 1F1B-RR)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.ir.stage_ranks import placement_of
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.critical_path import critical_path
from pipecompile.schedule.named_orders import generate, peak_in_flight
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.receives import add_earliest_receives
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.naive import naive_times
from tests.schedule.strategies import works


@st.composite
def replicated_problems(draw: st.DrawFn) -> PlacedProblem:
    """Stages of 1 to 4 ranks, with at least one microbatch for each of them."""
    replicas = [*draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), 1]
    times = st.lists(st.integers(0, 9), min_size=len(replicas) - 1, max_size=len(replicas) - 1)
    return PlacedProblem(
        placement=placement_of(replicas),
        microbatches=draw(st.integers(max(replicas), 8)),
        costs=tuple(replace(draw(works(False)), recompute=False) for _ in replicas),
        forward_transfer_ns=tuple(draw(times)),
        backward_transfer_ns=tuple(draw(times)),
        gradient=(True,) * (len(replicas) - 1),
    )


def order_on(replicas: list[int], microbatches: int, name: str = "1f1b") -> list[str]:
    schedule = generate(name, placement_of(replicas), microbatches)
    return [" ".join(row) for row in schedule.actions]


def test_two_ranks_of_the_first_stage_take_turns() -> None:
    assert order_on([2, 1], 4) == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert order_on([2, 1], 3, "forward-only") == ["0F0 0F2", "0F1", "1F0 1F1 1F2"]


def test_forwards_in_advance_are_those_of_pipedreams_runtime() -> None:
    """Beyond one forward: (ranks from the stage on − 1) // its replicas, as its runtime.py has
    num_warmup_minibatches.
    """
    for replicas in ([7, 1], [15, 1], [1, 1, 1], [8, 3, 1], [2, 3, 4, 1]):
        left = sum(replicas)
        warmups = []
        for count in replicas:
            warmups.append((left - 1) // count)
            left -= count
        in_flight = peak_in_flight("1f1b", placement_of(replicas), 60)
        assert in_flight == tuple(warmup + 1 for warmup in warmups)


@settings(max_examples=30)
@given(replicated_problems(), st.sampled_from(["1f1b", "gpipe"]))
def test_orders_are_sound_and_are_simulated_as_by_sweeps(problem: PlacedProblem, name: str) -> None:
    schedule = generate(name, problem.placement, problem.microbatches)
    complete = add_transfers(problem, schedule)
    assert check_schedule(complete, problem) == []
    timeline, naive = simulate(problem, schedule), naive_times(problem, schedule)
    events = [event for row in timeline.events for event in row]
    assert {event.action: (event.start_ns, event.end_ns) for event in events} == {
        action: (naive.starts[action], naive.ends[action]) for action in naive.starts
    }
    assert list(timeline.peak_bytes) == naive.peaks
    path = critical_path(problem, timeline)
    assert max((each.event.end_ns for each in path), default=0) == timeline.makespan_ns
    # No receive stands earlier than where it may, whatever the times.
    received = add_earliest_receives(schedule)
    for rank, row in enumerate(complete.rows):
        for action in row:
            if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                assert action in received.rows[rank]


def test_a_message_from_the_wrong_replica_is_found() -> None:
    problem_order = add_transfers_of([2, 1], 2)
    rows = [list(row) for row in problem_order.rows]
    assert Action(0, Kind.REDUCE) in rows[1]
    rows[1].remove(Action(0, Kind.REDUCE))
    broken = Schedule.of("1f1b", 2, problem_order.placement, rows)
    assert check_schedule(broken) == ["rank 0: 0REDUCE_GRAD appears 1 times"]
    with pytest.raises(ValueError, match="rank 0 performs 0F1, but its stage is not placed there"):
        Schedule.of("1f1b", 2, (0, 2), [[Action(0, Kind.FORWARD, 1)], [], []])


def add_transfers_of(replicas: list[int], microbatches: int) -> Schedule:
    problem = PlacedProblem(
        placement=placement_of(replicas),
        microbatches=microbatches,
        costs=(StageCosts(1, 2),) * len(replicas),
        forward_transfer_ns=(0,) * (len(replicas) - 1),
        backward_transfer_ns=(0,) * (len(replicas) - 1),
        gradient=(True,) * (len(replicas) - 1),
    )
    return add_transfers(problem, generate("1f1b", problem.placement, microbatches))


def test_other_schedules_and_too_few_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"'zb-h1' is not known for stages with replicas.*1f1b"):
        order_on([2, 1], 4, "zb-h1")
    with pytest.raises(InputError, match="at least 3 microbatches on 4 ranks"):
        order_on([3, 1], 2)
