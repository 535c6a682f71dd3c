from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from pytest_regressions.file_regression import FileRegressionFixture

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Faster, Plan, Provenance
from pipecompile.ir.robustness import NoisyStep, Robustness
from pipecompile.ir.stage import EncodedNodes
from pipecompile.report.summary import summary
from pipecompile.report.tables import terminal_table
from pipecompile.report.timeline_text import timeline_text
from pipecompile.schedule.simulator import simulate_plan

MakePlan = Callable[..., Plan]


def test_the_summary_of_a_plan(make_plan: MakePlan, file_regression: FileRegressionFixture) -> None:
    plan = make_plan()
    file_regression.check(
        summary(plan) + "\n" + timeline_text(simulate_plan(plan)), encoding="utf-8"
    )


def test_the_summary_of_a_recomputing_plan(
    make_plan: MakePlan, file_regression: FileRegressionFixture
) -> None:
    plan = make_plan(microbatches=8, schedule="gpipe", recompute="stage")
    file_regression.check(
        summary(plan) + "\n" + timeline_text(simulate_plan(plan)), encoding="utf-8"
    )


def test_the_summary_of_a_plan_with_caps_and_regions(
    make_plan: MakePlan, file_regression: FileRegressionFixture
) -> None:
    caps = tuple(mib << 20 for mib in (205, 235, 1565, 193))
    plan = make_plan(microbatches=8, schedule="gpipe", recompute="sqrt", memory_bytes=caps)
    file_regression.check(summary(plan), encoding="utf-8")


def test_without_a_cap_and_without_recompute_nothing_is_said_of_them(
    make_plan: MakePlan,
) -> None:
    text = summary(make_plan(memory_bytes=None))
    assert "no cap" in text
    assert not any(word in text for word in (" cap ", "recomputed", "regions"))


def test_noise_shows_this_plan_and_the_fastest(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert "noise" not in summary(plan)
    chosen = NoisyStep(
        nominal_ns=plan.prediction.step_ns,
        p90_ns=plan.prediction.step_ns + 50_000_000,
        regret_ns=1_500_000,
    )
    fastest = msgspec.structs.replace(
        chosen, nominal_ns=plan.prediction.step_ns - 1_000_000, regret_ns=2_500_000
    )
    robustness = Robustness(
        noise=0.05, draws=200, seed=0, candidates=3, chosen=chosen, fastest=fastest
    )
    options = msgspec.structs.replace(plan.options, noise=0.05)
    noisy = msgspec.structs.replace(plan, options=options, robustness=robustness)
    lines = summary(noisy).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  noise"))
    assert lines[first : first + 3] == [
        "  noise      5%: least regret of 3 plans within 2 % of the shortest step",
        "             step 92.6 ms, 90th percentile 142.6 ms, regret 1.5 ms",
        "             fastest plan: step 91.6 ms, 90th percentile 142.6 ms, regret 2.5 ms",
    ]
    same = msgspec.structs.replace(robustness, candidates=1, fastest=chosen)
    alone = summary(msgspec.structs.replace(noisy, robustness=same))
    assert "5%: the only plan within 2 % of the shortest step\n" in alone
    assert "the fastest:" not in alone


def test_encodings_are_named_with_their_time(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    first = plan.stages[0]
    run = EncodedNodes(
        nodes=first.nodes[:2], encodings=("half", "mask"), forward_ns=2000, backward_ns=3000
    )
    first = msgspec.structs.replace(first, encoded_runs=(run,))
    text = summary(msgspec.structs.replace(plan, stages=(first, *plan.stages[1:])))
    assert "  encodings  mask, half, not exact\n" in text
    assert re.search(r"^ +0 nothing, encodings +5\.0 µs", text, re.MULTILINE)
    assert re.search(r"^ +1 nothing$", text, re.MULTILINE)
    assert (
        f"encoded saved tensors\n  stage  0  {run.nodes[0]} … {run.nodes[1]} (half, mask)\n" in text
    )


@pytest.mark.parametrize(("k", "recompute"), [(1, "none"), (3, "sqrt"), (12, "except-last")])
def test_a_summary_is_at_most_a_hundred_columns_wide(
    make_plan: MakePlan, k: int, recompute: str
) -> None:
    plan = make_plan(
        k=k,
        microbatches=16,
        recompute=recompute,
        memory_bytes=tuple((1 << 30) - s for s in range(k)),
    )
    long = tuple(f"{module}.{'a_long_name.' * 9}" for module in plan.stages[0].modules)
    stages = (msgspec.structs.replace(plan.stages[0], modules=long), *plan.stages[1:])
    text = summary(msgspec.structs.replace(plan, stages=stages)) + timeline_text(
        simulate_plan(plan)
    )
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_not_proven_is_not_claimed(make_plan: MakePlan) -> None:
    plan = make_plan()
    search = msgspec.structs.replace(
        plan.search,
        objective="max-load",
        method="cp-sat",
        value=2_000_000,
        bound=1_000_000,
        gap=0.5,
        proven=False,
    )
    text = summary(
        msgspec.structs.replace(plan, search=search, capture=Provenance(verified=False), routes=())
    )
    assert "max-load 2.0 ms, bound 1.0 ms, gap 50.00%, not proven (cp-sat)" in text
    assert "unverified capture" in text
    assert "relayed" not in text


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_simulated_step_of_the_objectives_is_the_predicted_one(
    make_plan: MakePlan, schedule: str
) -> None:
    plan = make_plan(schedule=schedule)
    assert plan.search.values["step_ns"] == plan.prediction.step_ns


def test_the_cut_is_valued_by_all_objectives(make_plan: MakePlan) -> None:
    plan = make_plan()
    values = {"max_load_ns": 12_340_000, "sum_of_squares_ns2": 5 * 10**14, "step_ns": 99_000_000}
    search = msgspec.structs.replace(plan.search, values=values)
    linked = summary(msgspec.structs.replace(plan, search=search)).splitlines()
    loads = "max 12.3 ms, Σ² 500.0 ms²; simulated step 99.0 ms"
    assert f"             load + transfers: {loads}" in linked
    free = summary(msgspec.structs.replace(plan, search=search, links=FREE)).splitlines()
    assert f"             load: {loads}" in free


def test_an_objective_that_would_be_faster_is_named(make_plan: MakePlan) -> None:
    plan = make_plan()
    step = plan.prediction.step_ns

    def notes(faster: Faster | None) -> list[str]:
        search = msgspec.structs.replace(plan.search, faster=faster)
        lines = summary(msgspec.structs.replace(plan, search=search)).splitlines()
        return [line for line in lines if "note" in line]

    assert notes(None) == []
    assert notes(Faster(objective="max-load", step_ns=round(step * 0.958))) == [
        "  note       objective max-load would shorten the simulated step to 88.7 ms (-4.2%)"
    ]


def test_a_plan_without_the_values_of_objectives_is_printed(make_plan: MakePlan) -> None:
    plan = make_plan()
    text = summary(
        msgspec.structs.replace(plan, search=msgspec.structs.replace(plan.search, values={}))
    )
    assert "Σ²" not in text


def test_what_is_proven_of_the_extra_time_stands_beside_it(make_plan: MakePlan) -> None:
    plan = make_plan(recompute="sqrt")
    first = msgspec.structs.replace(plan.stages[0], recompute_bound_ns=7_000)
    options = msgspec.structs.replace(plan.options, recompute="auto")
    text = summary(msgspec.structs.replace(plan, options=options, stages=(first, *plan.stages[1:])))
    assert re.search(r"extra time +of forward +at least", text)
    assert re.search(r"^ +0 .* regions? .* 100\.0% +7\.0 µs", text, re.MULTILINE)
    assert "at least" not in summary(plan)


def test_auto_without_a_cap_is_said_to_do_nothing(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    note = "  note       without a memory cap nothing is recomputed or encoded"
    assert note in summary(
        msgspec.structs.replace(
            plan, options=msgspec.structs.replace(plan.options, recompute="auto")
        )
    )
    assert note not in summary(plan)


def test_times_of_flops_costs_are_units_and_never_seconds(make_plan: MakePlan) -> None:
    text = summary(make_plan(costs="flops", bandwidth=None))
    assert "  step       90.5 M units, bubble" in text
    assert "  costs      flops; times are relative units, not seconds (1 k is 1,000 units)" in text
    assert re.search(r"^ +0 +14\.0 M █+ +1\d\d\.\d%", text, re.MULTILINE), (
        "a load and its share of the mean"
    )
    without_links = re.sub(r"^  links .*$", "", text, flags=re.MULTILINE)
    assert not re.search(r"\d (ns|µs|ms|s)\b", without_links)


def test_the_fixed_part_of_a_bound_is_named(make_plan: MakePlan) -> None:
    plan = make_plan()
    text = summary(plan)
    assert re.search(
        r"^ +1 .* 43\.0 MiB 151\.0 MiB 203\.1 MiB 1\.0 GiB 820\.9 MiB$", text, re.MULTILINE
    )
    assert "fixed: of the bound, what the allocator and the communication library take" in text


def test_columns_without_content_are_left_out(make_plan: MakePlan) -> None:
    text = summary(make_plan(memory_bytes=None))
    assert not re.search(r"^(stage|rank) .*(recompute|optimizer|cap|left)", text, re.MULTILINE)
    interleaved = summary(make_plan(schedule="interleaved-1f1b", stages_per_rank=2))
    assert re.search("^stage rank modules", interleaved, re.MULTILINE)


def test_a_terminal_has_the_same_cells(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = make_plan()
    drawn = re.sub("\x1b\\[[0-9;]*m", "", summary(plan, terminal_table))
    cells = [line.split() for line in drawn.splitlines() if not set(line) <= set(" ─")]
    assert cells == [line.split() for line in summary(plan).splitlines() if line]


@pytest.mark.parametrize(
    ("bandwidth", "why"), [(None, "its slowest rank never waits"), (10**6, "messages are waited")]
)
def test_an_asynchronous_plan_says_how_long_a_minibatch_takes(
    make_plan: MakePlan, bandwidth: int | None, why: str
) -> None:
    plan = make_plan(schedule="pipedream", bandwidth=bandwidth)
    assert plan.prediction.minibatch_ns is not None
    minibatch = time_with_unit(plan.prediction.minibatch_ns, plan.time_unit)
    text = summary(plan)
    assert f"in a full pipeline one takes {minibatch}, bubble " in text
    assert why in text
    assert "full pipeline" not in summary(make_plan())
