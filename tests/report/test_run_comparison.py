"""A recorded run against its plan: figures, text and page, from runs that were made up."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from pipecompile.api.comparison import comparison_of, run_trace
from pipecompile.errors import InputError
from pipecompile.ir.duration import time_text
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.schedule import Action, Kind
from pipecompile.ir.size import size_text
from pipecompile.report.run_comparison import RunComparison, compare_run, comparison_figures
from pipecompile.report.run_page import run_page
from pipecompile.report.run_text import comparison_text, ratios_text
from pipecompile.schedule.full_pipeline import simulate_minibatches
from pipecompile.schedule.simulator import simulate_plan
from tests.recorded_runs import LEAVING_NS, recorded_run, recorded_step
from tests.report.pages import Page

MakePlan = Callable[..., Plan]


def compared(plan: Plan, run: RecordedRun) -> RunComparison:
    return compare_run(plan, simulate_plan(plan), run)


def slowed(plan: Plan, forward: float, backward: float) -> RunComparison:
    return compared(
        plan, recorded_run(plan, recorded_step(plan, 0, forward=forward, backward=backward))
    )


def test_a_run_as_predicted_has_ratios_of_one(make_plan: MakePlan) -> None:
    plan = make_plan(bandwidth=None)
    comparison = slowed(plan, 1, 1)
    assert {action.time.ratio for action in comparison.actions} == {1.0}
    assert {time.ratio for time in comparison.kinds.values()} == {1.0}
    # The run has actions alone: the sum of the tied weight, which ends the step, is not in it.
    last_ns = max(row[-1].end_ns for row in simulate_plan(plan).events)
    assert comparison.step.measured_ns == last_ns + LEAVING_NS
    assert comparison.bubble[1] == pytest.approx(comparison.bubble[0], abs=1e-3)


def test_each_kind_each_stage_and_each_rank_has_its_own_ratio(make_plan: MakePlan) -> None:
    plan = make_plan()
    comparison = slowed(plan, 2, 3)
    assert comparison.kinds[Kind.FORWARD].ratio == pytest.approx(2)
    assert comparison.kinds[Kind.BACKWARD].ratio == pytest.approx(3)
    wanted = {Kind.FORWARD: 2, Kind.BACKWARD: 3}
    assert [(row.rank, row.stage, row.count) for row in comparison.stages[::2]] == [
        (stage, stage, plan.microbatches) for stage in range(4)
    ]
    for row in comparison.stages:
        assert row.time.ratio == pytest.approx(wanted[row.kind], rel=1e-6)
    for rank, busy in zip(comparison.ranks, simulate_plan(plan).busy_ns, strict=True):
        assert rank.busy.predicted_ns == busy
        assert 2 < rank.busy.measured_ns / busy < 3
        assert rank.waiting_ns > 0


def test_the_worst_ten_are_the_largest_differences(make_plan: MakePlan) -> None:
    plan = make_plan(microbatches=8)
    worst = slowed(plan, 1, 2).worst
    assert len(worst) == 10
    assert {action.action.kind for action in worst} == {Kind.BACKWARD}
    differences = [action.time.difference_ns for action in worst]
    assert differences == sorted(differences, reverse=True)
    # An action that is too fast by much is as far from its prediction.
    assert all(action.time.difference_ns < 0 for action in slowed(plan, 1, 0.1).worst)


def test_a_measured_time_is_the_median_of_the_steps(make_plan: MakePlan) -> None:
    plan = make_plan()
    steps = [recorded_step(plan, i, forward=f) for i, f in enumerate((9.0, 1.0, 2.0))]
    comparison = compared(plan, recorded_run(plan, *steps))
    assert comparison.kinds[Kind.FORWARD].ratio == pytest.approx(2)
    assert comparison.typical is steps[2]


def test_what_messages_take_on_a_rank_belongs_to_their_action(make_plan: MakePlan) -> None:
    plan = make_plan(k=2)
    step = recorded_step(plan)
    first = step.ranks[0]
    sent = first.actions[0]._replace(action="0SEND_F0", start_ns=0, ready_ns=0, end_ns=500)
    rank = msgspec.structs.replace(first, actions=(sent, *first.actions))
    changed = msgspec.structs.replace(step, ranks=(rank, *step.ranks[1:]))
    action = next(
        a for a in compared(plan, recorded_run(plan, changed)).actions if str(a.action) == "0F0"
    )
    assert action.time.difference_ns == 500


def test_a_backward_that_one_process_has_split_counts_as_a_whole(make_plan: MakePlan) -> None:
    plan = make_plan(k=2)
    step = recorded_step(plan)
    rows = []
    for rank in step.ranks:
        actions = []
        for recorded in rank.actions:
            action, half = Action.parse(recorded.action), recorded.ready_ns + recorded.work_ns // 3
            if action.kind is not Kind.BACKWARD:
                actions.append(recorded)
                continue
            first = action._replace(kind=Kind.BACKWARD_INPUT)
            second = action._replace(kind=Kind.BACKWARD_WEIGHT)
            actions.append(recorded._replace(action=str(first), end_ns=half))
            actions.append(recorded._replace(action=str(second), start_ns=half, ready_ns=half))
        rows.append(msgspec.structs.replace(rank, actions=tuple(actions)))
    split = msgspec.structs.replace(step, ranks=tuple(rows))
    comparison = compared(plan, recorded_run(plan, split, processes=1))
    assert comparison.kinds[Kind.BACKWARD].ratio == 1


def test_relative_units_are_compared_by_shares(make_plan: MakePlan) -> None:
    plan = make_plan(costs="flops")
    comparison = slowed(plan, 2, 4)
    compute = comparison.compute
    assert compute.predicted_ns == pytest.approx(compute.measured_ns, rel=1e-6)
    kinds = comparison.kinds
    forward, backward = kinds[Kind.FORWARD].ratio, kinds[Kind.BACKWARD].ratio
    assert forward is not None and backward is not None
    assert backward / forward == pytest.approx(2, rel=1e-6)
    assert "costs flops are relative units: only shares are compared" in comparison_text(comparison)
    assert comparison_figures(comparison)["compares"] == "shares"


def test_one_process_is_compared_with_the_sum_of_all_ranks(make_plan: MakePlan) -> None:
    plan = make_plan()
    comparison = compared(plan, recorded_run(plan, recorded_step(plan), processes=1))
    per_step = sum(stage.per_step_ns for stage in plan.stages)
    assert comparison.step.predicted_ns == sum(simulate_plan(plan).busy_ns) + per_step
    text = comparison_text(comparison)
    assert "one process performed the actions of all ranks in turns" in text
    assert "bubble" not in text and "waiting" not in text


def test_peaks_stand_beside_what_the_plan_expects(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert "peak" not in comparison_text(slowed(plan, 1, 1))
    run = recorded_run(plan, recorded_step(plan, peak_bytes=123 << 20))
    text = comparison_text(compared(plan, run))
    memory = plan.prediction.memory[0].total
    assert f"{size_text(memory.expected)} {size_text(memory.bound)} {size_text(123 << 20)}" in text


def test_steps_of_fewer_microbatches_do_not_count(make_plan: MakePlan) -> None:
    plan = make_plan()
    short = msgspec.structs.replace(recorded_step(plan), microbatches=plan.microbatches - 1)
    with pytest.raises(InputError, match="no recorded step has all 4 microbatches"):
        compared(plan, recorded_run(plan, short))
    assert len(compared(plan, recorded_run(plan, short, recorded_step(plan))).steps) == 1


def test_a_run_that_lacks_an_action_is_refused(make_plan: MakePlan) -> None:
    plan = make_plan()
    step = recorded_step(plan)
    rank = msgspec.structs.replace(step.ranks[0], actions=step.ranks[0].actions[1:])
    damaged = msgspec.structs.replace(step, ranks=(rank, *step.ranks[1:]))
    with pytest.raises(InputError, match="the run does not have 0F0 of the plan"):
        compared(plan, recorded_run(plan, damaged))


def test_the_text_has_the_figures_and_both_timelines(make_plan: MakePlan) -> None:
    plan = make_plan()
    comparison = slowed(plan, 1, 2)
    text = comparison_text(comparison)
    assert text.startswith("1 step recorded on a device, torch 2.0\n")
    assert f"{time_text(plan.prediction.step_ns)} predicted, " in text
    assert text.count("rank  0 ") == 2
    assert max(map(len, text.splitlines())) <= 100
    assert "forward 1.00, backward 2.00" in ratios_text(comparison)


def test_the_page_has_both_timelines_to_one_scale(make_plan: MakePlan) -> None:
    plan = make_plan()
    comparison = slowed(plan, 1, 2)
    page, text = Page(), run_page(comparison)
    page.feed(text)
    assert page.open == []
    assert text.count("<svg") == 2
    assert {"script", "link", "img"}.isdisjoint(page.seen)
    assert "Predicted" in text and "Recorded: step 0, of median length" in text
    # The same axis under both: the shorter step leaves a part of it empty.
    axes = [part.partition("</svg>")[0] for part in text.split("<svg")[1:]]
    counts = [axis.count("<line") for axis in axes]
    assert counts[0] == counts[1] > 0
    assert text == run_page(comparison)


def test_figures_are_of_every_action(make_plan: MakePlan) -> None:
    plan = make_plan()
    figures = comparison_figures(slowed(plan, 1, 2))
    assert len(figures["actions"]) == 2 * plan.k * plan.microbatches
    assert figures["kinds"]["B"]["ratio"] == pytest.approx(2)
    assert figures["worst"] and set(figures["worst"]) <= {a["action"] for a in figures["actions"]}
    assert figures["ranks"][0]["peak_bytes"] is None


def test_minibatches_in_flight_are_compared_with_as_many_simulated_ones(
    make_plan: MakePlan,
) -> None:
    plan = make_plan(schedule="pipedream-2bw", bandwidth=None)
    minibatch_ns = plan.prediction.minibatch_ns
    assert minibatch_ns is not None and minibatch_ns < plan.prediction.step_ns
    steps = [recorded_step(plan, number, minibatches=n) for number, n in ((0, 3), (3, 10))]
    comparison = comparison_of(plan, recorded_run(plan, *steps))
    # Only the one with the most of them is compared.
    assert (comparison.minibatches, len(comparison.steps)) == (10, 1)
    assert {action.time.ratio for action in comparison.actions} == {1.0}
    # As above without the sum of the tied weight, with which the simulation ends.
    last_ns = max(row[-1].end_ns for row in simulate_minibatches(plan, 10).events)
    assert comparison.step.measured_ns == last_ns + LEAVING_NS
    assert comparison.minibatch is not None
    assert comparison.minibatch.measured_ns == pytest.approx(minibatch_ns, rel=1e-3)
    text = comparison_text(comparison)
    assert "10 minibatches in flight recorded on a device" in text
    assert "recorded: minibatches 3 to 12" in text
    assert comparison_figures(comparison)["minibatches"] == 10
    assert "10 minibatches in flight" in run_page(comparison)
    events = json.loads(run_trace(comparison))["traceEvents"]
    messages = [event["name"] for event in events if event["ph"] == "s"]
    # Of each microbatch over three boundaries, there and back.
    assert len(messages) == len(set(messages)) == 10 * plan.microbatches * 3 * 2


def test_a_pipeline_that_was_never_full_has_no_pace(make_plan: MakePlan) -> None:
    plan = make_plan(schedule="pipedream-2bw", bandwidth=None)
    run = recorded_run(plan, recorded_step(plan, minibatches=2))
    assert comparison_of(plan, run).minibatch is None
