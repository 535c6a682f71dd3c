from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.schedule.instance import ScheduleInstance
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.serial_order import serial_order
from pipecompile.schedule.window import improve_window, window_between
from tests.schedule.brute import best
from tests.schedule.cases import equal
from tests.schedule.instances import instances, sound


@given(instances(), st.integers(-5, 200), st.integers(1, 60))
def test_a_window_is_ordered_anew_within_the_caps_and_computes_no_longer(
    instance: ScheduleInstance, start: int, width: int
) -> None:
    rows = serial_order(instance)
    if rows is None:
        return
    times = sound(instance, rows)
    window = window_between(instance, rows, times.ends, start, start + width)
    found, spent = improve_window(instance, rows, times, window, effort=0.02, seed=0)
    assert spent >= 0
    if found is not None:
        sound(instance, found)
        assert _computing(instance, found) <= _computing(instance, rows)
        for before, after, (first, stop) in zip(rows, found, window.ranges, strict=True):
            assert (before[:first], before[stop:]) == (after[:first], after[stop:])


def _computing(instance: ScheduleInstance, rows: list[list[int]]) -> int:
    return max(sound(instance, rows).ends)


def _whole(problem: PlacedProblem) -> int | None:
    """Return the serial order after a window over all of it has been reordered."""
    instance = ScheduleInstance(problem, tuple(costs.can_split for costs in problem.costs))
    rows = serial_order(instance)
    assert rows is not None
    times = sound(instance, rows)
    window = window_between(instance, rows, times.ends, 0, times.makespan_ns + 1)
    found, _ = improve_window(instance, rows, times, window, effort=1.0, seed=0)
    return None if found is None else sound(instance, found).makespan_ns


def test_a_window_over_everything_finds_the_best_of_all_orders() -> None:
    costs = (
        StageCosts(2, 5, 3, 2, kept_bytes=3, between_bytes=1),
        StageCosts(3, 4, 2, 2, kept_bytes=2, between_bytes=2),
    )
    problem = replace(equal([0, 1], 3, hop=1), costs=costs, caps=(7, 4))
    assert _whole(problem) == best(problem, "makespan")


@pytest.mark.parametrize("unit", [1, 10**12])
def test_hours_and_terabytes_are_no_larger_than_the_solver_takes(unit: int) -> None:
    costs = StageCosts(unit, unit * 2, unit, unit, kept_bytes=unit, between_bytes=unit // 2)
    problem = replace(equal([0, 1], 3), costs=(costs, costs), caps=(3 * unit, 2 * unit))
    assert _whole(problem) == best(problem, "makespan")
