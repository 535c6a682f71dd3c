from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.schedule import Action, Event, Kind, Schedule, Timeline
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.problem import Network, PlacedProblem, Skip, StageCosts
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal, order
from tests.schedule.naive import naive_times
from tests.schedule.strategies import orders, problems


def _starts(timeline: Timeline, rank: int) -> list[int]:
    return [event.start_ns for event in timeline.events[rank]]


@given(st.data())
def test_a_naive_simulator_agrees(data: st.DataObject) -> None:
    """With all networks, skips, reductions, caps, recomputes, placements and gradients."""
    problem = data.draw(problems())
    schedule = data.draw(orders(problem))
    timeline, naive = simulate(problem, schedule), naive_times(problem, schedule)
    events = [event for row in timeline.events for event in row]
    assert {event.action: event.start_ns for event in events} == naive.starts
    assert {event.action: event.end_ns for event in events} == naive.ends
    assert timeline.makespan_ns == naive.makespan_ns
    assert list(timeline.peak_bytes) == naive.peaks
    sums = {event.action.stage: event.end_ns for row in timeline.reductions for event in row}
    assert sums == {s: end for s, end in naive.reduced.items() if problem.costs[s].reduce_ns}


@given(st.data())
def test_busy_time_and_the_causes_of_idle_time_add_up_to_the_makespan(data: st.DataObject) -> None:
    problem = data.draw(problems())
    timeline = simulate(problem, data.draw(orders(problem)))
    for busy, idle in zip(timeline.busy_ns, timeline.idle, strict=True):
        assert busy + idle.total_ns == timeline.makespan_ns
        assert min(idle.dependency_ns, idle.transfer_ns, idle.memory_ns, idle.imbalance_ns) >= 0
        assert idle.imbalance_ns <= max(timeline.busy_ns) - busy
        assert idle.memory_ns == 0 or problem.caps is not None


@given(st.data())
def test_without_transfers_and_reductions_no_rank_idles_for_them(data: st.DataObject) -> None:
    problem = data.draw(problems())
    free = replace(
        problem,
        costs=tuple(replace(costs, reduce_ns=0) for costs in problem.costs),
        forward_transfer_ns=(0,) * len(problem.forward_transfer_ns),
        backward_transfer_ns=(0,) * len(problem.backward_transfer_ns),
        skips=tuple(replace(skip, forward_ns=0, backward_ns=0) for skip in problem.skips),
    )
    assert all(idle.transfer_ns == 0 for idle in simulate(free, data.draw(orders(free))).idle)


@given(st.data())
def test_the_memory_curve_ends_at_zero_and_never_goes_back_in_time(data: st.DataObject) -> None:
    problem = data.draw(problems())
    timeline = simulate(problem, data.draw(orders(problem)))
    for rank in range(problem.ranks):
        curve = timeline.memory(rank)
        assert curve[-1][1] == 0
        assert all(left[0] <= right[0] for left, right in pairwise(curve))
        assert max(held for _, held in curve) == timeline.peak_bytes[rank]


@given(st.data())
def test_a_lowered_schedule_has_the_timeline_of_its_compute_actions(data: st.DataObject) -> None:
    problem = data.draw(problems(skips=False))
    schedule = data.draw(orders(problem))
    assert simulate(problem, add_transfers(problem, schedule)) == simulate(problem, schedule)


def test_waits_for_messages_and_for_work_are_told_apart() -> None:
    timeline = simulate(equal([0, 1], 1, time=10, hop=3), order(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    assert timeline.makespan_ns == 46
    assert [
        (idle.transfer_ns, idle.dependency_ns, idle.imbalance_ns) for idle in timeline.idle
    ] == [(3, 23, 0)] * 2


def test_a_rank_with_less_to_do_idles_for_imbalance_first() -> None:
    problem = replace(equal([0, 1], 1, time=10), costs=(StageCosts(10, 10), StageCosts(4, 10)))
    timeline = simulate(problem, order(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    assert [(idle.dependency_ns, idle.imbalance_ns) for idle in timeline.idle] == [(14, 0), (14, 6)]


def test_a_forward_that_does_not_fit_makes_its_rank_idle_for_memory() -> None:
    """Rank 0 could start F1 at 10, but has room for one microbatch only until B0 ends at 40."""
    costs = (StageCosts(10, 10, kept_bytes=5),) * 2
    problem = replace(equal([0, 1], 2, time=10), costs=costs, caps=(5, 10))
    timeline = simulate(problem, order(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], [0, 1], 2))
    assert [idle.memory_ns for idle in timeline.idle] == [20, 0]
    assert (
        simulate(
            replace(problem, caps=(10, 10)),
            order(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], [0, 1], 2),
        )
        .idle[0]
        .memory_ns
        == 0
    )


def test_on_a_shared_link_messages_travel_one_at_a_time() -> None:
    problem = equal([0, 1], 2, time=1, hop=10)
    schedule = order(["0F0 0F1", "1F0 1F1"], [0, 1], 2)
    assert _starts(simulate(problem, schedule), 1) == [11, 12]
    assert _starts(simulate(replace(problem, network=Network(shared=True)), schedule), 1) == [
        11,
        21,
    ]


def test_a_rank_that_blocks_while_it_sends_idles_for_the_transfer() -> None:
    problem = replace(equal([0, 1], 2, time=1, hop=10), network=Network(blocking=True))
    timeline = simulate(problem, order(["0F0 0F1", "1F0 1F1"], [0, 1], 2))
    assert (_starts(timeline, 0), _starts(timeline, 1)) == ([0, 11], [11, 22])
    assert timeline.idle[0].transfer_ns == 20


def test_a_skip_is_waited_for_in_both_directions_and_held_by_its_source() -> None:
    skip = Skip(0, 2, 7, forward_ns=50, backward_ns=80)
    problem = replace(equal([0, 1, 2], 1, time=1), skips=(skip,))
    timeline = simulate(problem, order(["0F0 0B0", "1F0 1B0", "2F0 2B0"], range(3), 1))
    assert [row[-1].start_ns for row in timeline.events] == [133, 53, 52]
    assert timeline.peak_bytes == (7, 0, 0)


def test_skips_share_a_link_with_what_goes_to_the_next_stage() -> None:
    """Stages 1 and 2 lie on one rank: the message to the first of them goes first."""
    problem = replace(
        equal([0, 1, 1], 1, time=1, hop=10),
        skips=(Skip(0, 2, 0, 10, 10),),
        network=Network(shared=True),
    )
    timeline = simulate(problem, order(["0F0", "1F0 2F0"], [0, 1, 1], 1))
    assert _starts(timeline, 1) == [11, 21]


def test_reductions_overlap_compute_and_follow_each_other() -> None:
    costs = (StageCosts(10, 10, reduce_ns=15), StageCosts(10, 10, reduce_ns=15))
    problem = replace(equal([0, 0], 1), costs=costs)
    timeline = simulate(problem, order(["0F0 1F0 1B0 0B0"], [0, 0], 1))
    reduce = [Action(stage, Kind.REDUCE) for stage in range(2)]
    assert timeline.reductions == ((Event(reduce[1], 30, 45), Event(reduce[0], 45, 60)),)
    assert (timeline.makespan_ns, timeline.span_ns) == (60, 40)
    assert timeline.idle[0].transfer_ns == 20


def test_steps_and_versions_take_no_time() -> None:
    plain = simulate(equal([0], 2), order(["0F0 0B0 0F1 0B1"], [0], 2))
    asynchronous = simulate(
        equal([0], 2), order(["0F0@0 0B0@0 0STEP0 0F1@1 0B1@1 0STEP1"], [0], 2, "stashed")
    )
    assert asynchronous.makespan_ns == plain.makespan_ns
    assert str(asynchronous.events[0][2].action) == "0F1@1"


def test_recomputation_fills_the_wait_for_the_gradient() -> None:
    problem = equal([0, 1], 1, time=10)
    plain = simulate(problem, order(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    recomputing = simulate(problem, order(["0F0 0R0 0B0", "1F0 1B0"], [0, 1], 1))
    assert recomputing.makespan_ns == plain.makespan_ns
    assert _starts(recomputing, 0) == [0, 10, 30]


def test_without_a_gradient_a_backward_does_not_wait() -> None:
    problem = replace(equal([0, 1], 1, time=10, hop=3), gradient=(False,))
    assert _starts(simulate(problem, order(["0F0 0B0", "1F0 1B0"], [0, 1], 1)), 0) == [0, 10]


def test_weight_backwards_follow_input_backwards_and_release_nobody() -> None:
    timeline = simulate(equal([0, 1], 1, time=10), order(["0F0 0I0 0W0", "1F0 1I0 1W0"], [0, 1], 1))
    assert _starts(timeline, 0) == [0, 30, 40]


def test_stages_on_one_rank_transfer_nothing() -> None:
    problem = replace(
        equal([0, 0], 1, time=10), forward_transfer_ns=(99,), network=Network(blocking=True)
    )
    assert simulate(problem, order(["0F0 1F0 1B0 0B0"], [0, 0], 1)).makespan_ns == 40


def test_a_deadlock_names_what_every_rank_waits_for() -> None:
    with pytest.raises(
        ScheduleError, match="rank 0 stops at 0B0 until 0F0 is done; rank 1 stops at 1F0 until 0F0"
    ):
        simulate(equal([0, 1], 1), order(["0B0 0F0", "1F0 1B0"], [0, 1], 1))


def test_an_action_whose_input_nobody_makes_is_a_deadlock_too() -> None:
    with pytest.raises(ScheduleError, match="rank 0 stops at 0B0 until 1B0 is done"):
        simulate(equal([0, 1], 1), order(["0F0 0B0", "1F0"], [0, 1], 1))


def test_halves_of_a_backward_that_does_not_split_are_refused() -> None:
    problem = replace(equal([0], 1), costs=(StageCosts(1, 2, can_split=False),))
    with pytest.raises(
        ScheduleError, match="0I0: the backward of stage 0 is not split; use B instead"
    ):
        simulate(problem, order(["0F0 0I0 0W0"], [0], 1))


def test_a_schedule_of_another_problem_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"for placement \[0\] and 1 microbatches, the problem for \[0\] and 2"
    ):
        simulate(equal([0], 2), order(["0F0 0B0"], [0], 1))


def test_the_span_is_that_of_one_rank() -> None:
    schedule = generate("forward-only", range(3), 2, False)
    timeline = simulate(equal(range(3), 2, time=10), schedule)
    assert (timeline.makespan_ns, timeline.span_ns) == (40, 20)


def test_nothing_takes_no_time() -> None:
    problem = PlacedProblem((0,), 1, (StageCosts(1, 1),), (), (), ())
    timeline = simulate(problem, Schedule.of("nothing", 1, [0], [[]]))
    assert (timeline.makespan_ns, timeline.bubble, timeline.peak_bytes) == (0, 0.0, (0,))
