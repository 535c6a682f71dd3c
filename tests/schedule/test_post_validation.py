"""Leading forwards, and steps in a row, against what ranks could do by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.schedule import COMPUTE, Kind, Schedule, Timeline
from pipecompile.schedule.named_orders import ASYNCHRONOUS, SPLIT, fitting_names, generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.post_validation import leading_forwards, step_in_a_row_ns
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.transfers import add_transfers
from tests.schedule.cases import equal, order
from tests.schedule.strategies import problems


@st.composite
def _planned(draw: st.DrawFn) -> tuple[PlacedProblem, Schedule]:
    """A named order on any placement that it fits, with its messages."""
    problem = draw(problems(skips=False))
    names = fitting_names(problem.placement, problem.microbatches)
    splits = all(costs.can_split for costs in problem.costs)
    unfit = {*ASYNCHRONOUS, "forward-only", *(() if splits else SPLIT)}
    known = [name for name in names if name not in unfit]
    return problem, generate(draw(st.sampled_from(known)), problem.placement, problem.microbatches)


def test_what_leads_is_what_others_have_sent() -> None:
    schedule = order(
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
        ],
        [0, 1],
        3,
    )
    assert leading_forwards(schedule) == (4, 2)
    # The receive is posted early, of a message that comes only after the backward.
    early = order(
        [
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        ],
        [0, 1],
        2,
    )
    assert leading_forwards(early) == (2, 1)


@pytest.mark.parametrize("shape", ["linear", "loop", "v"])
@pytest.mark.parametrize("microbatches", [3, 8])
def test_leading_actions_can_happen_by_themselves(shape: str, microbatches: int) -> None:
    """They are forwards, and each message that one of them takes is sent by another one."""
    placement = place(shape, 4, 1 if shape == "linear" else 2)  # type: ignore[arg-type]
    for name in fitting_names(placement, microbatches):
        if name in (*ASYNCHRONOUS, "forward-only"):
            continue
        problem = equal(placement, microbatches)
        schedule = add_transfers(problem, generate(name, placement, microbatches))
        counts = leading_forwards(schedule)
        leading = [a for row, n in zip(schedule.rows, counts, strict=True) for a in row[:n]]
        done = {(a.stage, a.microbatch) for a in leading if a.kind is Kind.FORWARD}
        sent = {(a.stage, a.microbatch) for a in leading if a.kind is Kind.SEND_FORWARD}
        received = {(a.stage - 1, a.microbatch) for a in leading if a.kind is Kind.RECEIVE_FORWARD}
        assert {a.kind for a in leading if a.kind in COMPUTE} == {Kind.FORWARD}, name
        assert received <= sent <= done, name
        assert all(stage == 0 or (stage - 1, m) in done for stage, m in done), name


@given(_planned())
def test_steps_in_a_row_follow_as_closely_as_they_can(
    planned: tuple[PlacedProblem, Schedule],
) -> None:
    problem, compute = planned
    schedule = add_transfers(problem, compute)
    timeline = simulate(problem, schedule)
    found = step_in_a_row_ns(schedule, timeline)
    possible = (t for t in range(timeline.makespan_ns + 1) if _can_repeat(schedule, timeline, t))
    assert found == next(possible)


def _can_repeat(schedule: Schedule, timeline: Timeline, period: int) -> bool:
    """Whether each rank can begin the same step `period` later: no two of its actions overlap, and
    what comes after its leading forwards begins when all ranks have done the first step.
    """
    counts = leading_forwards(schedule)
    for rank, events in enumerate(timeline.events):
        end = max((e.end_ns for e in (*events, *timeline.reductions[rank])), default=0)
        leading = set(schedule.rows[rank][: counts[rank]])
        for action, start, _ in events:
            if start + period < end:
                return False
            if action not in leading and start + period < timeline.makespan_ns:
                return False
    return True


def test_zero_bubble_steps_take_their_longest_load() -> None:
    """The paper's H2 without a bubble: with four ranks and equal costs."""
    problem = equal(range(4), 12)
    schedule = add_transfers(problem, generate("zb-h2", range(4), 12))
    timeline = simulate(problem, schedule)
    assert step_in_a_row_ns(schedule, timeline) == max(timeline.busy_ns) == 36
    assert timeline.makespan_ns == 39
