from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.schedule import CriticalEvent, Kind
from pipecompile.schedule.critical_path import critical_path
from pipecompile.schedule.problem import Network, PlacedProblem, Skip, StageCosts
from pipecompile.schedule.simulator import simulate
from tests.schedule.cases import equal, order
from tests.schedule.strategies import orders, problems

FIELDS = {
    Kind.FORWARD: "forward_ns",
    Kind.BACKWARD: "backward_ns",
    Kind.BACKWARD_INPUT: "backward_input_ns",
    Kind.BACKWARD_WEIGHT: "backward_weight_ns",
    Kind.RECOMPUTE: "recompute_ns",
}


def _text(path: tuple[CriticalEvent, ...]) -> str:
    return " ".join(f"{step.why}:{step.event.action}" for step in path)


@given(st.data())
def test_a_path_leads_from_the_start_to_the_end_without_a_hole(data: st.DataObject) -> None:
    problem = data.draw(problems())
    timeline = simulate(problem, data.draw(orders(problem)))
    path = critical_path(problem, timeline)
    assert bool(path) == (timeline.makespan_ns > 0)
    if path:
        assert (path[0].event.start_ns, path[0].why) == (0, "start")
        assert path[-1].event.end_ns == timeline.makespan_ns
    for left, right in pairwise(path):
        gap = right.event.start_ns - left.event.end_ns
        assert gap > 0 if right.why in ("send", "transfer", "queue") else gap == 0
        assert left.rank == right.rank or right.why in ("dependency", "transfer", "queue")


@given(st.data())
def test_what_is_on_the_path_makes_the_step_longer_if_it_takes_longer(data: st.DataObject) -> None:
    problem = data.draw(problems())
    schedule = data.draw(orders(problem))
    timeline = simulate(problem, schedule)
    path = [step for step in critical_path(problem, timeline) if step.why != "reduction"]
    for step in path:
        stage, kind, *_ = step.event.action
        times = sum(other.event.action[:2] == (stage, kind) for other in path)
        slower = simulate(_slower(problem, stage, FIELDS[kind]), schedule)
        assert slower.makespan_ns >= timeline.makespan_ns + times


def _slower(problem: PlacedProblem, stage: int, field: str) -> PlacedProblem:
    costs = list(problem.costs)
    costs[stage] = replace(costs[stage], **{field: getattr(costs[stage], field) + 1})
    return replace(problem, costs=tuple(costs))


def test_a_step_is_as_long_as_one_microbatch_there_and_back_and_all_of_them_on_one_rank() -> None:
    problem = equal([0, 1], 2, time=10, hop=3)
    path = critical_path(
        problem, simulate(problem, order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], [0, 1], 2))
    )
    assert _text(path) == "start:0F0 transfer:1F0 rank:1B0 rank:1F1 rank:1B1 transfer:0B1"


def test_messages_on_a_shared_link_lead_to_the_first_of_them() -> None:
    problem = equal(
        [0, 1, 1], 1, time=1, hop=10, skips=(Skip(0, 2, 0, 10, 10),), network=Network(shared=True)
    )
    path = critical_path(problem, simulate(problem, order(["0F0", "1F0 2F0"], [0, 1, 1], 1)))
    assert _text(path) == "start:0F0 queue:2F0"


def test_a_rank_that_blocks_while_it_sends_is_on_the_path() -> None:
    problem = equal([0, 1], 2, time=1, hop=10, network=Network(blocking=True))
    path = critical_path(problem, simulate(problem, order(["0F0 0F1", "1F0 1F1"], [0, 1], 2)))
    assert _text(path) == "start:0F0 send:0F1 transfer:1F1"


def test_reductions_can_be_what_a_step_ends_with() -> None:
    problem = equal([0, 0], 1, costs=(StageCosts(10, 10, reduce_ns=15),) * 2)
    path = critical_path(problem, simulate(problem, order(["0F0 1F0 1B0 0B0"], [0, 0], 1)))
    assert (
        _text(path) == "start:0F0 rank:1F0 rank:1B0 reduction:1REDUCE_GRAD reduction:0REDUCE_GRAD"
    )
