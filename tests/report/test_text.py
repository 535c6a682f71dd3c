from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from pytest_regressions.file_regression import FileRegressionFixture

from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Faster, Plan, Provenance, Saving
from pipecompile.ir.schedule import Action, Event, Idle, Timeline
from pipecompile.report.text import (
    gap_text,
    objective_text,
    size_text,
    summary,
    time_text,
    timeline_text,
)
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


def test_the_summary_of_a_plan_with_budgets_and_regions(
    make_plan: MakePlan, file_regression: FileRegressionFixture
) -> None:
    caps = tuple(mib << 20 for mib in (140, 170, 1500, 128))
    plan = make_plan(microbatches=8, schedule="gpipe", recompute="sqrt", memory_bytes=caps)
    file_regression.check(summary(plan), encoding="utf-8")


def test_without_a_budget_and_without_recompute_nothing_is_said_of_them(
    make_plan: MakePlan,
) -> None:
    text = summary(make_plan(memory_bytes=None))
    assert "no cap" in text
    assert not any(word in text for word in ("budget", "computed again", "regions"))


def test_other_forms_are_named_with_their_time(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    first = plan.stages[0]
    run = Saving(
        nodes=first.nodes[:2], policies=("half", "mask"), forward_ns=2000, backward_ns=3000
    )
    first = msgspec.structs.replace(first, saving=(run,))
    text = summary(msgspec.structs.replace(plan, stages=(first, *plan.stages[1:])))
    assert "  saving     mask, half, not exact\n" in text
    assert re.search(r"^ +0 nothing, other forms +5\.0 µs", text, re.MULTILINE)
    assert re.search(r"^ +1 nothing$", text, re.MULTILINE)
    assert (
        f"saved in other forms\n  stage  0  {run.nodes[0]} … {run.nodes[1]} (half, mask)\n" in text
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
    loads = "             max load 12.3 ms, Σ load² 500.0 ms²"
    linked = summary(msgspec.structs.replace(plan, search=search)).splitlines()
    assert f"{loads} with transfers, simulated step 99.0 ms" in linked
    free = summary(msgspec.structs.replace(plan, search=search, links=FREE)).splitlines()
    assert f"{loads}, simulated step 99.0 ms" in free


def test_an_objective_that_would_be_faster_is_named(make_plan: MakePlan) -> None:
    plan = make_plan()
    step = plan.prediction.step_ns

    def notes(faster: Faster | None) -> list[str]:
        search = msgspec.structs.replace(plan.search, faster=faster)
        lines = summary(msgspec.structs.replace(plan, search=search)).splitlines()
        return [line for line in lines if "note" in line]

    assert notes(None) == []
    assert notes(Faster(objective="max-load", step_ns=round(step * 0.958))) == [
        "  note       objective max-load would shorten the simulated step to 88.3 ms (-4.2%)"
    ]


def test_a_plan_without_the_values_of_objectives_is_printed(make_plan: MakePlan) -> None:
    plan = make_plan()
    text = summary(
        msgspec.structs.replace(plan, search=msgspec.structs.replace(plan.search, values={}))
    )
    assert "max load" not in text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1500, "1.5 µs"),
        (12_340_000, "12.3 ms"),
        (3_000_000_000, "3.0 s"),
    ],
)
def test_times_adapt_their_unit(nanoseconds: int, text: str) -> None:
    assert time_text(nanoseconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (16 << 30, "16.0 GiB")],
)
def test_sizes_adapt_their_unit(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("objective", "value", "text"),
    [
        ("variance", 999_949, "1.0 µs²"),
        ("variance", 7 * 10**14, "700.0 ms²"),
        ("variance", 2 * 10**21, "2,000.0 s²"),
        ("max-load", 1500, "1.5 µs"),
        ("step-time", 12_340_000, "12.3 ms"),
    ],
)
def test_values_of_objectives_adapt_their_unit(objective: str, value: int, text: str) -> None:
    assert objective_text(objective, value) == text


@pytest.mark.parametrize(
    ("gap", "text"), [(0.0, "0.00%"), (1e-9, "<0.01%"), (0.0001, "0.01%"), (0.25, "25.00%")]
)
def test_a_small_gap_is_not_none(gap: float, text: str) -> None:
    assert gap_text(gap) == text


def test_a_timeline_in_letters() -> None:
    words = [["0F0", "0F11", "0R0", "0B0"], ["1F0", "1I0", "1W0"]]
    rows = tuple(
        tuple(Event(Action.parse(word), 2 * i, 2 * i + 2) for i, word in enumerate(row))
        for row in words
    )
    idle = Idle(dependency_ns=0, transfer_ns=0)
    assert timeline_text(Timeline(rows, (idle, idle)), width=8).splitlines()[:2] == [
        "rank  0 0011rraa",
        "rank  1 00aaww··",
    ]


def test_what_is_proven_of_the_extra_time_stands_beside_it(make_plan: MakePlan) -> None:
    plan = make_plan(recompute="sqrt")
    first = msgspec.structs.replace(plan.stages[0], recompute_bound_ns=7_000)
    options = msgspec.structs.replace(plan.options, recompute="auto")
    text = summary(msgspec.structs.replace(plan, options=options, stages=(first, *plan.stages[1:])))
    assert re.search(r"extra time +of forward +at least", text)
    assert re.search(r"^ +0 .* regions? .* 100\.0% +7\.0 µs", text, re.MULTILINE)
    assert "at least" not in summary(plan)


def test_auto_without_a_budget_is_said_to_do_nothing(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    note = "  note       without a memory budget nothing is computed again"
    assert note in summary(
        msgspec.structs.replace(
            plan, options=msgspec.structs.replace(plan.options, recompute="auto")
        )
    )
    assert note not in summary(plan)
