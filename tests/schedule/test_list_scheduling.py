from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.schedule.instance import WEIGHT, Rows, ScheduleInstance
from pipecompile.schedule.list_scheduling import (
    Priorities,
    build_order,
    refill_weight_backwards,
)
from pipecompile.schedule.priorities import (
    random_priorities,
    systematic_priorities,
    thrifty_priorities,
    varied_priorities,
)
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.serial_order import serial_order, single_microbatch_peak
from tests.schedule.brute import best
from tests.schedule.instances import instances, sound, tiny_problems
from tests.sweeps import examples


@st.composite
def policies(draw: st.DrawFn, instance: ScheduleInstance) -> Priorities:
    source = random.Random(draw(st.integers(0, 99)))
    known = [*thrifty_priorities(instance), *systematic_priorities(instance)]
    priorities = (
        draw(st.sampled_from(known)) if draw(st.booleans()) else random_priorities(instance, source)
    )
    return varied_priorities(priorities, source) if draw(st.booleans()) else priorities


def _roomy(instance: ScheduleInstance) -> bool:
    caps = instance.problem.caps
    return caps is None or all(
        single_microbatch_peak(instance, rank) <= cap for rank, cap in enumerate(caps)
    )


@settings(max_examples=examples(300))
@given(st.data())
def test_any_policy_comes_to_its_end_within_the_caps(data: st.DataObject) -> None:
    """Where one microbatch fits in any order; with skips, cut gradients, recomputes, placements."""
    instance = data.draw(instances())
    rows = build_order(instance, data.draw(policies(instance)), data.draw(st.integers(0, 200)))
    assert (rows is not None) == _roomy(instance)
    if rows is not None:
        sound(instance, rows)


@settings(max_examples=examples(200))
@given(st.data())
def test_refilled_orders_fit_and_differ_in_weight_backwards_alone(data: st.DataObject) -> None:
    instance = data.draw(instances())
    rows = build_order(
        instance, data.draw(policies(instance)), data.draw(st.integers(0, 200))
    ) or serial_order(instance)
    if rows is not None:
        filled = refill_weight_backwards(instance, rows)
        sound(instance, filled)
        assert _without_weights(instance, filled) == _without_weights(instance, rows)


def _without_weights(instance: ScheduleInstance, rows: Rows) -> Rows:
    return [
        [operation for operation in row if instance.decode(operation)[0] != WEIGHT] for row in rows
    ]


@given(tiny_problems())
def test_one_microbatch_after_the_other_fits_if_any_order_does(problem: PlacedProblem) -> None:
    instance = ScheduleInstance(problem, tuple(costs.can_split for costs in problem.costs))
    rows = serial_order(instance)
    assert (rows is None) == (best(problem, "makespan") is None)
    if rows is not None:
        sound(instance, rows)


def test_a_stage_that_no_gradient_comes_back_to_lets_go_before_the_next_one_enters() -> None:
    """Two stages of 5 bytes on one rank of 5: F B of one, then of the other."""
    problem = PlacedProblem(
        (0, 0),
        2,
        (StageCosts(1, 1, kept_bytes=5, can_split=False),) * 2,
        (0,),
        (0,),
        (False,),
        caps=(5,),
    )
    instance = ScheduleInstance(problem, (False, False))
    assert build_order(instance, Priorities((1, 1)), 4) is None
    rows = serial_order(instance)
    assert rows is not None
    sound(instance, rows)


def test_what_a_weight_backward_holds_makes_room_for_a_recompute() -> None:
    """Stage 2 holds all 10 bytes of the cap until its W; only then can stage 0 recompute."""
    costs = StageCosts(
        1, 2, 1, 1, recompute_ns=1, recomputed_bytes=10, between_bytes=10, recompute=True
    )
    problem = PlacedProblem((0, 1, 0), 2, (costs,) * 3, (0, 0), (0, 0), (True, True), caps=(10, 10))
    instance = ScheduleInstance(problem, (True,) * 3)
    for priorities in systematic_priorities(instance):
        rows = build_order(instance, priorities, 100)
        assert rows is not None
        sound(instance, rows)
