from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pipecompile.ir.plan import Plan
from pipecompile.memory_model.rank import activation_curve
from pipecompile.report.trace import trace
from pipecompile.schedule.simulator import simulate_plan

MakePlan = Callable[..., Plan]


def _events(plan: Plan) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(trace(plan, simulate_plan(plan)))["traceEvents"]
    return events


def test_the_prediction_is_what_the_plan_simulates(make_plan: MakePlan) -> None:
    plan = make_plan(recompute="stage")
    timeline = simulate_plan(plan)
    assert (timeline.makespan_ns, timeline.idle) == (plan.prediction.step_ns, plan.prediction.idle)


def test_a_trace_has_the_same_bytes_twice(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert trace(plan, simulate_plan(plan)) == trace(plan, simulate_plan(plan))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "forward-only"])
def test_every_action_and_every_message_is_there(make_plan: MakePlan, schedule: str) -> None:
    plan = make_plan(schedule=schedule, microbatches=5)
    events = _events(plan)
    kinds = Counter(event["ph"] for event in events)
    compute = sum(map(len, plan.schedule.compute))
    sends = sum("SEND" in text for row in plan.schedule.actions for text in row)
    assert kinds == {"M": 8, "X": compute, "C": compute, "s": sends, "f": sends}
    assert {event["pid"] for event in events} == set(range(plan.ranks))


def test_an_arrow_leads_from_the_end_of_its_action_to_the_start_of_the_next(
    make_plan: MakePlan,
) -> None:
    events = _events(make_plan())
    ends = {event["name"]: event["ts"] + event["dur"] for event in events if event["ph"] == "X"}
    starts = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    arrows = {(event["ph"], event["name"]): event for event in events if event["ph"] in "sf"}
    assert arrows["s", "1SEND_F2"]["ts"] == pytest.approx(ends["1F2"])
    assert arrows["f", "1SEND_F2"]["ts"] == starts["2F2"]
    assert arrows["f", "1SEND_F2"]["pid"] == 2
    assert arrows["s", "1SEND_B2"]["args"] == {"bytes": 2 << 20}
    assert arrows["f", "1SEND_B2"]["ts"] == starts["0B2"]


def test_the_counter_shows_the_activations_and_ends_at_none(make_plan: MakePlan) -> None:
    plan = make_plan(microbatches=6)
    for rank, memory in enumerate(plan.prediction.memory):
        counts = [event for event in _events(plan) if event["ph"] == "C" and event["pid"] == rank]
        held = [
            amount.expected
            for _, amount in activation_curve(plan.footprints(rank), plan.schedule.rows[rank])
        ]
        peak = max(event["args"]["bytes"] for event in counts)
        assert peak == max(held)
        assert peak >= memory.activations.expected, "at the moment when most is held of all kinds"
        assert counts[-1]["args"]["bytes"] == 0
        assert [event["ts"] for event in counts] == sorted(event["ts"] for event in counts)
