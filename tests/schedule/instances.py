"""Instances for the searches, problems with any caps, and what every order must be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pipecompile.schedule.instance import OrderTimes, Rows, ScheduleInstance
from pipecompile.schedule.problem import Network, PlacedProblem
from tests.schedule.naive import naive_times
from tests.schedule.strategies import problems

FREE = st.builds(Network)


@st.composite
def capped(draw: st.DrawFn, problem: PlacedProblem) -> PlacedProblem:
    """The problem with less memory, often too little."""
    if problem.caps is None or draw(st.booleans()):
        return problem
    return replace(problem, caps=tuple(draw(st.integers(0, cap)) for cap in problem.caps))


@st.composite
def instances(draw: st.DrawFn) -> ScheduleInstance:
    problem = draw(capped(draw(problems(max_microbatches=6))))
    return ScheduleInstance(
        problem, tuple(costs.can_split and draw(st.booleans()) for costs in problem.costs)
    )


@st.composite
def tiny_problems(draw: st.DrawFn) -> PlacedProblem:
    """Problems of so few actions that all orders can be looked at; links are free."""
    one = draw(
        problems(max_microbatches=1, networks=FREE).filter(lambda problem: _marks(problem) <= 16)
    )
    several = replace(one, microbatches=draw(st.integers(1, min(3, 16 // _marks(one)))))
    return draw(capped(several))


def _marks(problem: PlacedProblem) -> int:
    return sum(3 + costs.recompute for costs in problem.costs)


def sound(instance: ScheduleInstance, rows: Rows) -> OrderTimes:
    """Return the times of an order; assert that it is complete, fits and is in microbatch order."""
    times, problem = instance.times(rows), instance.problem
    assert times is not None
    assert instance.fits(rows)
    lanes = [(kind, stage) for stage, kinds in enumerate(instance.kinds) for kind in kinds]
    for kind, stage in lanes:
        wanted = [instance.operation(kind, stage, j) for j in range(problem.microbatches)]
        assert [o for o in rows[problem.placement[stage]] if o in wanted] == wanted
    assert sum(map(len, rows)) == len(lanes) * problem.microbatches
    schedule = instance.to_schedule("", rows)
    naive = naive_times(replace(problem, network=Network()), schedule)
    assert times.makespan_ns == naive.makespan_ns
    assert times.span_ns == max(
        naive.ends[row[-1]] - naive.starts[row[0]] for row in schedule.compute if row
    )
    assert problem.caps is None or all(
        a <= b for a, b in zip(naive.peaks, problem.caps, strict=True)
    )
    return times
