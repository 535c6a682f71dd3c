"""The page of a plan: whole, and with all that the plan says of memory and of what is computed again."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from pipecompile.ir.plan import Plan, Saving
from pipecompile.report.text import size_text, time_text
from pipecompile.report.view import plan_page
from pipecompile.schedule.simulator import simulate_plan
from tests.report.pages import Page

MakePlan = Callable[..., Plan]
CAPS = tuple(mib << 20 for mib in (140, 170, 1500, 128))


def paged(plan: Plan) -> str:
    return plan_page(plan, simulate_plan(plan))


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    return make_plan(microbatches=8, schedule="gpipe", recompute="sqrt", memory_bytes=CAPS)


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]


def test_a_page_is_whole_and_needs_nothing_else(plan: Plan) -> None:
    page = Page()
    page.feed(paged(plan))
    assert page.open == []
    assert {"script", "link", "img"}.isdisjoint(page.seen) and "svg" in page.seen
    assert paged(plan) == paged(plan)


def test_each_rank_has_its_budget_and_its_peak_by_kind(plan: Plan) -> None:
    rows = cells(paged(plan), "Memory of each rank at its peak")
    for row, cap, memory in zip(rows, CAPS, plan.prediction.memory, strict=True):
        total = memory.total
        assert row[-4:] == [
            size_text(size) for size in (total.expected, total.bound, cap, cap - total.bound)
        ]
        assert row[2] == size_text(memory.parameters.expected) and row[7] == size_text(
            memory.workspace.expected
        )
        widths = [float(width) for width in re.findall(r"width:([0-9.]+)%", row[1])]
        assert sum(widths) == pytest.approx(100 * total.bound / cap, abs=0.05)


def test_each_stage_has_what_it_computes_again_and_for_how_long(plan: Plan) -> None:
    page = paged(plan)
    rows = cells(page, "Stages, for one microbatch")
    for row, stage in zip(rows[:3], plan.stages, strict=False):
        assert row[5:8] == [
            f"{len(stage.nodes)} of {len(stage.nodes)} nodes in 2 regions",
            time_text(stage.recompute_ns),
            "100.0%",
        ]
    assert rows[3][5:8] == ["nothing", "", ""]
    regions = cells(page, "Regions that are computed again")
    assert [int(nodes) for *_, nodes in regions] == [
        len(r) for stage in plan.stages for r in stage.regions
    ]
    assert regions[0][0] == "<code>block.0 … block.1</code>"


def test_without_budgets_bars_are_shares_of_the_largest_bound(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    page, bounds = paged(plan), [memory.total.bound for memory in plan.prediction.memory]
    rows = cells(page, "Memory of each rank at its peak")
    assert rows[bounds.index(max(bounds))][-1] == size_text(max(bounds))
    assert "budget" not in page and "Regions" not in page


def test_other_forms_are_listed_with_their_times(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    assert "other forms" not in paged(plan)
    first = plan.stages[0]
    run = Saving(nodes=first.nodes[:1], policies=("mask",), forward_ns=2000, backward_ns=3000)
    page = paged(
        msgspec.structs.replace(
            plan, stages=(msgspec.structs.replace(first, saving=(run,)), *plan.stages[1:])
        )
    )
    rows = cells(page, "Saved in other forms")
    assert rows == [[f"<code>{run.nodes[0]} (mask)</code>", "0", time_text(2000), time_text(3000)]]


def test_names_are_escaped(plan: Plan) -> None:
    first = msgspec.structs.replace(plan.stages[0], modules=("<script>",))
    page = paged(msgspec.structs.replace(plan, stages=(first, *plan.stages[1:])))
    assert "<script" not in page and "&lt;script&gt;" in page
