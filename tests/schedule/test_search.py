from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.ir.schedule import Kind
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.placement import place
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.search import OBJECTIVES, SearchResult, search, simulate_named
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.brute import best
from tests.schedule.cases import equal
from tests.schedule.instances import capped, tiny_problems
from tests.schedule.naive import naive_times
from tests.schedule.strategies import problems
from tests.sweeps import examples


def _found(problem: PlacedProblem, objective: str, seconds: float) -> SearchResult | None:
    try:
        return search(problem, objective=objective, seconds=seconds)
    except InfeasibleError:
        return None


def _naive_value(problem: PlacedProblem, found: SearchResult) -> int:
    times = naive_times(problem, found.schedule)
    assert problem.caps is None or all(
        a <= b for a, b in zip(times.peaks, problem.caps, strict=True)
    )
    if found.objective == "makespan":
        return times.makespan_ns
    return max(times.ends[row[-1]] - times.starts[row[0]] for row in found.schedule.compute if row)


@settings(max_examples=examples(200))
@given(tiny_problems(), st.sampled_from(OBJECTIVES))
def test_an_order_is_found_wherever_there_is_one_and_no_better_one_than_there_is(
    problem: PlacedProblem, objective: str
) -> None:
    least, found = best(problem, objective), _found(problem, objective, 0.02)
    assert (found is None) == (least is None)
    if found is not None and least is not None:
        assert found.bound_ns <= least <= found.value_ns


@settings(max_examples=examples(200))
@given(st.data(), st.sampled_from(OBJECTIVES))
def test_orders_are_sound_and_no_worse_than_named_ones_on_any_network(
    data: st.DataObject, objective: str
) -> None:
    problem = data.draw(
        capped(data.draw(problems(skips=data.draw(st.booleans()), max_microbatches=6)))
    )
    found = _found(problem, objective, 0.02)
    if found is not None:
        assert found.value_ns == _naive_value(problem, found)
        assert (
            found.bound_ns
            <= found.value_ns
            <= min((n.value_ns for n in found.named if n.fits), default=found.value_ns)
        )
        assert found == search(problem, objective=objective, seconds=0.02)
        if not problem.skips:  # skips travel on links of their own
            assert check_schedule(add_transfers(problem, found.schedule), problem) == []


def _uneven(microbatches: int, unit: int = 1000) -> PlacedProblem:
    """Eight unequal stages in a V with small caps."""
    times = [7, 5, 6, 9, 4, 8, 5, 6]
    costs = tuple(
        StageCosts(t * unit, 2 * t * unit, t * unit, t * unit, kept_bytes=t, between_bytes=t // 2)
        for t in times
    )
    return replace(equal(place("v", 4, 2), microbatches, hop=unit), costs=costs, caps=(40,) * 4)


_PRINT = """
from pipecompile.schedule.search import search
from tests.schedule.test_search import _uneven
print(search(_uneven(6), seconds=0.4).schedule.actions)
"""


def test_another_process_finds_the_same() -> None:
    """Strings hash differently in another process; windows are searched too."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{search(_uneven(6), seconds=0.4).schedule.actions}\n"}


@pytest.mark.parametrize("unit", [1, 10**12])
def test_a_better_order_than_any_named_one_is_found_in_any_unit(unit: int) -> None:
    found = search(_uneven(8, unit), seconds=0.4)
    assert found.value_ns < min(named.value_ns for named in found.named if named.fits)
    assert found.value_ns % unit == 0


def test_named_orders_recompute_wherever_the_problem_says() -> None:
    """The last stage recomputes too if it is asked to, though `generate` never does that."""
    costs = StageCosts(1, 2, recompute_ns=1, can_split=False, recompute=True)
    for named in simulate_named(replace(equal([0, 1], 3), costs=(costs, costs)), "makespan"):
        recomputes = [
            action for row in named.schedule.rows for action in row if action.kind is Kind.RECOMPUTE
        ]
        assert len(recomputes) == 6


def test_an_error_says_which_rank_cannot_hold_one_microbatch() -> None:
    problem = replace(equal([0, 1], 2), costs=(StageCosts(1, 2, kept_bytes=5),) * 2, caps=(5, 4))
    with pytest.raises(
        InfeasibleError, match="holds 5 B on rank 1, whose cap is 4 B; allow more memory"
    ):
        search(problem)


def test_a_problem_that_is_large_for_its_time_is_searched_nevertheless() -> None:
    found = search(replace(equal(range(4), 200, time=10), caps=(3, 3, 3, 3)), seconds=0.001)
    assert found.bound_ns <= found.value_ns


def test_many_microbatches_under_1f1bs_memory_come_near_the_bound() -> None:
    """With time for a few builds only, ranks with slack wait rather than delay the others."""
    draw = random.Random(0)
    times = [[draw.randrange(800, 1201) for _ in range(3)] for _ in range(16)]
    costs = tuple(StageCosts(f, i + w, i, w, kept_bytes=2, between_bytes=1) for f, i, w in times)
    found = search(
        replace(equal(range(16), 128, hop=50), costs=costs, caps=(32,) * 16), seconds=0.4
    )
    assert found.value_ns <= 1.005 * found.bound_ns


def test_an_input_backward_that_leaves_more_than_it_finds_is_not_split_where_it_does_not_fit() -> (
    None
):
    """One microbatch holds 4 bytes, 7 after its input backward, and a cap leaves room for 5."""
    costs = StageCosts(10, 10, 5, 5, kept_bytes=4, between_bytes=7)
    problem = PlacedProblem((0, 1), 2, (costs,) * 2, (0,), (0,), (True,), caps=(5, 5))
    found = search(problem, seconds=0.1)
    assert all(action.kind in (Kind.FORWARD, Kind.BACKWARD) for _, action in found.schedule)
    with pytest.raises(InfeasibleError, match="one microbatch alone holds 4 B on rank 0"):
        search(replace(problem, caps=(3, 3)), seconds=0.1)
