from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.recompute import move_recomputes
from pipecompile.schedule.simulator import simulate
from tests.schedule.cases import equal, order
from tests.schedule.strategies import orders, problems
from tests.sweeps import examples


def _without(schedule: Schedule) -> list[list[Action]]:
    return [
        [action for action in row if action.kind is not Kind.RECOMPUTE] for row in schedule.rows
    ]


@settings(max_examples=examples(300))
@given(st.data())
def test_nothing_begins_later_no_peak_is_higher_and_no_other_order_changes(
    data: st.DataObject,
) -> None:
    problem = data.draw(problems())
    before = data.draw(orders(problem))
    after = move_recomputes(problem, before)
    was, now = simulate(problem, before), simulate(problem, after)
    assert _without(after) == _without(before)
    assert sorted(map(str, sum(after.rows, ()))) == sorted(map(str, sum(before.rows, ())))
    starts = {event.action: event.start_ns for row in was.events for event in row}
    for row in now.events:
        assert all(event.start_ns <= starts[event.action] for event in row)
    assert now.makespan_ns <= was.makespan_ns
    caps = problem.caps or (0,) * problem.ranks
    assert all(
        new <= max(old, cap)
        for new, old, cap in zip(now.peak_bytes, was.peak_bytes, caps, strict=True)
    )


def _gpipe(caps: tuple[int, ...] | None) -> PlacedProblem:
    recomputing = StageCosts(
        10, 20, recompute_ns=10, kept_bytes=1, recomputed_bytes=9, between_bytes=10, recompute=True
    )
    last = StageCosts(10, 20, kept_bytes=10, between_bytes=10)
    return replace(equal(range(3), 4), costs=(recomputing, recomputing, last), caps=caps)


def test_gpipe_recomputes_before_the_gradient_arrives_what_fits() -> None:
    problem = _gpipe((4 + 27, 4 + 18, 40))
    before = generate("gpipe", range(3), 4, True)
    after = move_recomputes(problem, before)
    assert [" ".join(row) for row in after.actions[:2]] == [
        "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0B0 0B1 0B2 0R3 0B3",
        "1F0 1F1 1F2 1F3 1R0 1R1 1B0 1B1 1R2 1B2 1R3 1B3",
    ]
    assert after.actions[2] == before.actions[2]
    assert (simulate(problem, before).makespan_ns, simulate(problem, after).makespan_ns) == (
        210,
        200,
    )
    assert simulate(problem, after).peak_bytes == (31, 22, 40)


def test_where_no_step_gets_shorter_no_memory_is_spent() -> None:
    before = generate("gpipe", range(3), 4, True)
    assert move_recomputes(_gpipe((4 + 27, 4 + 9, 40)), before) == before


def test_without_a_cap_no_more_is_held_than_before() -> None:
    before = generate("gpipe", range(3), 4, True)
    assert move_recomputes(_gpipe(None), before) == before


def test_a_recompute_stays_behind_its_forward_and_steps_behind_their_backward() -> None:
    problem = equal([0, 1], 2, costs=_gpipe(None).costs[1:], caps=(99, 99))
    rows = [
        "0F0@0 0R0@0 0B0@0 0STEP0@1 0F1@1 0R1@1 0B1@1 0STEP1@2",
        "1F0@0 1B0@0 1STEP0@1 1F1@1 1B1@1 1STEP1@2",
    ]
    schedule = order(rows, [0, 1], 2)
    assert move_recomputes(problem, schedule) == schedule
