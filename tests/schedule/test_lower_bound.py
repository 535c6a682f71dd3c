from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.schedule.instance import ScheduleInstance
from pipecompile.schedule.lower_bound import lower_bound
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.search import OBJECTIVES, order_lower_bound
from tests.schedule.brute import best
from tests.schedule.cases import equal
from tests.schedule.instances import tiny_problems
from tests.sweeps import examples


@settings(max_examples=examples(300))
@given(tiny_problems(), st.sampled_from(OBJECTIVES))
def test_no_order_at_all_is_below_the_bound(problem: PlacedProblem, objective: str) -> None:
    """For all orders of microbatches, with full and split backwards side by side."""
    least = best(problem, objective)
    assert least is None or order_lower_bound(problem, objective) <= least


@given(tiny_problems(), st.sampled_from(OBJECTIVES))
def test_an_order_of_microbatches_loses_nothing(problem: PlacedProblem, objective: str) -> None:
    split = tuple(costs.can_split for costs in problem.costs)
    least = best(problem, objective, lambda stage: (split[stage],))
    assert best(problem, objective, lambda stage: (split[stage],), in_turn=True) == least
    assert least is None or lower_bound(ScheduleInstance(problem, split), objective) <= least


def test_a_backward_that_no_gradient_calls_for_need_not_wait() -> None:
    """Stage 0 does its backward before stage 2, on its rank too, has even begun."""
    problem = replace(equal([0, 1, 0], 1, time=10, hop=100), gradient=(False, False))
    assert order_lower_bound(problem, "makespan") <= best(problem, "makespan") == 240


def test_recomputes_may_come_before_the_backwards_of_others() -> None:
    problem = replace(
        equal([0, 1, 0], 2, time=10),
        costs=(StageCosts(10, 10, recompute_ns=10, can_split=False, recompute=True),) * 3,
    )
    assert order_lower_bound(problem, "makespan") <= best(problem, "makespan")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_rank_without_a_stage_and_a_cap_of_nothing_have_a_bound(objective: str) -> None:
    problem = replace(equal([0, 2], 3, time=10), caps=(0, 0, 0))
    assert order_lower_bound(problem, objective) == {"makespan": 80, "span": 60}[objective]


def test_a_cap_that_lets_one_microbatch_in_makes_its_trips_add_up() -> None:
    """Rank 0 takes a microbatch only after the one before is back: 3 round trips of 60, then W."""
    costs = (StageCosts(10, 20, 10, 10, kept_bytes=1),) * 3
    problem = replace(equal([0, 1, 2], 3), costs=costs, caps=(1, 9, 9))
    assert order_lower_bound(problem, "makespan") == 3 * 60 + 10


def test_sums_over_replicas_end_the_step() -> None:
    problem = equal([0], 2, time=10)
    assert (
        order_lower_bound(
            replace(problem, costs=(replace(problem.costs[0], reduce_ns=7),)), "makespan"
        )
        == 47
    )
