from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.schedule.hill_climbing import hill_climb, objective_ns
from pipecompile.schedule.instance import BACKWARD, FORWARD, WEIGHT, ScheduleInstance
from pipecompile.schedule.search import OBJECTIVES
from pipecompile.schedule.serial_order import serial_order
from tests.schedule.cases import equal
from tests.schedule.instances import instances, sound


@given(instances(), st.sampled_from(OBJECTIVES), st.integers(0, 9))
def test_an_order_never_gets_worse_and_keeps_within_the_caps(
    instance: ScheduleInstance, objective: str, seed: int
) -> None:
    rows = serial_order(instance)
    if rows is not None:
        found = hill_climb(instance, rows, objective=objective, steps=60, seed=seed, enough=0)
        assert objective_ns(sound(instance, found), objective) <= objective_ns(
            sound(instance, rows), objective
        )


def test_weight_backwards_climb_out_of_the_way() -> None:
    """The serial order takes 2 × 6; the best is the bound of 7 for two ranks of unit times."""
    instance = ScheduleInstance(equal([0, 1], 2), (True, True))
    rows = [
        [
            instance.operation(kind, stage, j)
            for j in range(2)
            for kind in (FORWARD, BACKWARD, WEIGHT)
        ]
        for stage in range(2)
    ]
    found = hill_climb(instance, rows, objective="makespan", steps=500, seed=0, enough=0)
    assert sound(instance, found).makespan_ns == 7


def test_it_stops_at_what_is_enough() -> None:
    instance = ScheduleInstance(equal([0], 2), (True,))
    rows = serial_order(instance)
    assert rows is not None
    assert hill_climb(instance, rows, objective="makespan", steps=10**9, seed=0, enough=6) == rows
