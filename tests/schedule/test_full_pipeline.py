"""The pace of a full pipeline, against the simulation of many minibatches."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.schedule import COMPUTE, Schedule
from pipecompile.schedule.asynchronous_versions import DOUBLE_BUFFERED, PipelineSize
from pipecompile.schedule.continuous_order import ContinuousOrder
from pipecompile.schedule.full_pipeline import full_pipeline_ns
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.simulator import simulate

TIMES = st.integers(1, 20)


@st.composite
def problems(draw: st.DrawFn) -> PlacedProblem:
    """Stages on ranks of their own, of which some recompute; messages that may take longer."""
    ranks = draw(st.integers(1, 4))
    costs = [
        StageCosts(
            draw(TIMES),
            draw(TIMES),
            recompute_ns=draw(TIMES),
            recompute=draw(st.booleans()) and stage + 1 < ranks,
        )
        for stage in range(ranks)
    ]
    forward, backward = (
        tuple(draw(st.lists(st.integers(0, 20), min_size=ranks - 1, max_size=ranks - 1)))
        for _ in range(2)
    )
    gradient = (True,) * (ranks - 1)
    return PlacedProblem(tuple(range(ranks)), 1, tuple(costs), forward, backward, gradient)


def simulated_ns(problem: PlacedProblem, count: int) -> int:
    """What so many microbatches take from the empty pipeline to the empty one."""
    size = PipelineSize((1,) * problem.ranks, 1)
    recomputed = [(stage, 0) for stage, recomputes in enumerate(problem.recompute) if recomputes]
    rows = [
        ContinuousOrder(size, DOUBLE_BUFFERED, {stage: ()}, recomputed).until(count, count)
        for stage in range(problem.stages)
    ]
    compute = [[a._replace(version=None) for a in row if a.kind in COMPUTE] for row in rows]
    schedule = Schedule.of("1f1b", count, problem.placement, compute)
    return simulate(replace(problem, microbatches=count), schedule).makespan_ns


@settings(max_examples=15, deadline=None)
@given(problems())
def test_the_pace_is_that_of_many_microbatches(problem: PlacedProblem) -> None:
    pace = full_pipeline_ns(problem)
    # Filling and emptying take no longer than everything does once, however many there are.
    once = sum(each.forward_ns + each.backward_ns + each.recompute_ns for each in problem.costs)
    once += sum(problem.forward_transfer_ns) + sum(problem.backward_transfer_ns)
    for count in (12, 2400):
        assert abs(simulated_ns(problem, count) - pace * count) <= once


def test_messages_hold_up_a_full_pipeline() -> None:
    """Two stages of 3 each, and 2 for a message there and back: (3 + 3 + 2) / 2 for each."""
    costs = (StageCosts(1, 2), StageCosts(1, 2))
    problem = PlacedProblem((0, 1), 1, costs, (1,), (1,), (True,))
    assert full_pipeline_ns(problem) == 4
    assert simulated_ns(problem, 100) - simulated_ns(problem, 50) == 4 * 50
    free = replace(problem, forward_transfer_ns=(0,), backward_transfer_ns=(0,))
    assert full_pipeline_ns(free) == 3
