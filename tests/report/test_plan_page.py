"""The page of a plan: whole, and with all that the plan says of time, memory and recompute."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from pipecompile.ir.amount import Amount
from pipecompile.ir.duration import time_text
from pipecompile.ir.plan import Plan
from pipecompile.ir.size import size_text
from pipecompile.ir.stage import EncodedNodes
from pipecompile.report.plan_page import OtherPlan, plan_page
from pipecompile.report.run_comparison import compare_run
from pipecompile.schedule.simulator import simulate_plan
from tests.recorded_runs import recorded_run, recorded_step
from tests.report.pages import Page
from tests.report.transformers import transformer_plan

MakePlan = Callable[..., Plan]
CAPS = tuple(mib << 20 for mib in (205, 235, 1565, 193))
MEMORY, LOAD = "Memory of each rank at its peak", "Load of each rank"


def paged(plan: Plan) -> str:
    return plan_page(plan, simulate_plan(plan))


@pytest.fixture(scope="module")
def plan(make_plan: MakePlan) -> Plan:
    return make_plan(microbatches=8, schedule="gpipe", recompute="sqrt", memory_bytes=CAPS)


def section(page: str, heading: str) -> str:
    """What stands under a heading."""
    return page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without the header."""
    table = section(page, heading).partition("<table>")[2].partition("</table>")[0]
    rows = table.split("</tr>")[1:-1]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def header(page: str, heading: str) -> list[str]:
    return re.findall(r"<th[^>]*>(.*?)</th>", section(page, heading))


def test_a_page_is_whole_and_needs_nothing_else(plan: Plan) -> None:
    page = Page()
    page.feed(paged(plan))
    assert page.open == []
    assert {"link", "img", "iframe"}.isdisjoint(page.seen) and "canvas" in page.seen
    assert not re.search(r"\bsrc=|\bhref=|\burl\(|@import|https?:", paged(plan))
    assert paged(plan) == paged(plan)


def test_the_model_and_what_memory_is_predicted_for_are_named(plan: Plan) -> None:
    capture = msgspec.structs.replace(plan.capture, model="UNet", target="nets.py:unet")
    page = paged(msgspec.structs.replace(plan, capture=capture))
    sizes = "gpipe: 4 stages on 4 ranks, 8 microbatches"
    target = "memory predicted for a GPU, bound not proven"
    assert "<h1>nets.py:unet: UNet</h1>" in page and f"<p>{sizes}; {target}</p>" in page


def test_each_rank_has_a_bar_of_its_bound_and_its_cap(plan: Plan) -> None:
    rows = section(paged(plan), MEMORY).split('class="row"')[1:]
    # The cap of rank 2 is ten times what any rank holds: bars that had its scale would vanish.
    scale = max(memory.total.bound for memory in plan.prediction.memory)
    for row, cap, memory in zip(rows, CAPS, plan.prediction.memory, strict=True):
        bound = memory.total.bound
        widths = [float(width) for width in re.findall(r"width:([0-9.]+)%", row)]
        assert sum(widths) == pytest.approx(100 * bound / scale, abs=0.05)
        is_marked = f'<b style="left:calc({100 * cap / scale:.2f}% - 2px)">' in row
        assert (is_marked, "▸" in row) == (cap <= scale, cap > scale)
        assert f"bound {size_text(bound)} of {size_text(cap)}: {size_text(cap - bound)} left" in row
        assert 'class="fixed"' in row and "expected" in row


def test_a_cap_a_little_above_all_bounds_is_a_line_on_the_chart(plan: Plan) -> None:
    largest = max(memory.total.bound for memory in plan.prediction.memory)
    options = msgspec.structs.replace(plan.options, memory_bytes=largest * 5 // 4)
    row = section(paged(msgspec.structs.replace(plan, options=options)), MEMORY)
    assert row.count('<b style="left:calc(100.00% - 2px)">') == plan.ranks and "▸" not in row


def test_a_generous_cap_leaves_the_largest_bar_as_wide_as_the_chart(plan: Plan) -> None:
    options = msgspec.structs.replace(plan.options, memory_bytes=80 << 30)
    row = section(paged(msgspec.structs.replace(plan, options=options)), MEMORY)
    totals = [
        sum(map(float, re.findall(r"width:([0-9.]+)%", part))) for part in row.split('"row"')[1:]
    ]
    assert max(totals) == pytest.approx(100, abs=0.05)
    assert "▸ cap beyond the chart" in row
    assert row.count(">▸</s>") == plan.ranks and "<b style" not in row


def test_a_rank_over_its_cap_stands_out(plan: Plan) -> None:
    options = msgspec.structs.replace(plan.options, memory_bytes=100 << 20)
    row = section(paged(msgspec.structs.replace(plan, options=options)), MEMORY)
    over = plan.prediction.memory[0].total.bound - (100 << 20)
    assert f'<span class="over">{size_text(over)} over</span>' in row


def test_memory_by_kind_has_no_empty_columns(plan: Plan) -> None:
    page = paged(plan)
    kinds = ["parameters", "gradients", "activations", "buffers", "workspace"]
    assert header(page, MEMORY) == ["", *kinds, "expected"]
    for row, memory in zip(cells(page, MEMORY), plan.prediction.memory, strict=True):
        sizes = [*(getattr(memory, kind).expected for kind in kinds), memory.total.expected]
        assert row[1:] == list(map(size_text, sizes))


def test_the_load_of_a_rank_is_a_bar_of_what_it_runs(plan: Plan) -> None:
    rows = section(paged(plan), LOAD).split('class="row"')[1:]
    loads = plan.prediction.loads_ns
    for row, load in zip(rows, loads, strict=True):
        widths = [float(width) for width in re.findall(r"width:([0-9.]+)%", row)]
        assert sum(widths) == pytest.approx(100 * load / max(loads), abs=0.05)
        assert f"{time_text(load)}, {load * 4 / sum(loads):.1%} of the mean" in row
    assert [row.count('class="recompute"') for row in rows] == [1, 1, 1, 0]


def test_each_stage_has_what_it_recomputes_and_for_how_long(plan: Plan) -> None:
    page, heading = paged(plan), "Stages, for one microbatch"
    rows, names = cells(page, heading), header(page, heading)
    begin = names.index("recomputed")
    assert names[begin : begin + 3] == ["recomputed", "extra time", "of forward"]
    for row, stage in zip(rows[:3], plan.stages, strict=False):
        nodes = len(stage.nodes)
        texts = [f"{nodes} of {nodes} nodes in 2 regions", time_text(stage.recompute_ns), "100.0%"]
        assert row[begin : begin + 3] == texts
    assert rows[3][begin : begin + 3] == ["nothing", "", ""]
    regions = cells(page, "Regions that are recomputed")
    expected = [len(region) for stage in plan.stages for region in stage.regions]
    assert [int(nodes) for *_, nodes in regions] == expected
    assert regions[0][0] == "<code>block.0 … block.1</code>"


def test_without_caps_and_recompute_nothing_is_said_of_them(make_plan: MakePlan) -> None:
    page = paged(make_plan(memory_bytes=None))
    assert "<b></b>cap" not in page and "Regions" not in page and "<h2>Encoded" not in page
    assert "recomputed" not in page and "left<" not in page


def test_encodings_are_listed_with_their_times(make_plan: MakePlan) -> None:
    plan = make_plan(memory_bytes=None)
    first = plan.stages[0]
    run = EncodedNodes(
        nodes=first.nodes[:1], encodings=("mask",), forward_ns=2000, backward_ns=3000
    )
    stages = (msgspec.structs.replace(first, encoded_runs=(run,)), *plan.stages[1:])
    rows = cells(paged(msgspec.structs.replace(plan, stages=stages)), "Encoded saved tensors")
    assert rows == [[f"<code>{run.nodes[0]} (mask)</code>", "0", time_text(2000), time_text(3000)]]


def test_stages_that_share_a_rank_are_parts_of_it(make_plan: MakePlan) -> None:
    page = paged(make_plan(schedule="interleaved-1f1b", stages_per_rank=2))
    names = [row[0] for row in cells(page, MEMORY)]
    assert names == ["rank 0", "stage 0", "stage 2", "rank 1", "stage 1", "stage 3"]
    assert header(page, "Stages, for one microbatch")[2] == "rank"


def test_times_of_flops_costs_are_units_and_never_seconds(make_plan: MakePlan) -> None:
    page = paged(make_plan(costs="flops", recompute="stage"))
    assert "times are relative units, not seconds" in page
    assert " M units, " in section(page, LOAD)
    assert not re.search(r"\d (ns|µs|ms|s)\b", page)


def test_names_are_escaped(plan: Plan) -> None:
    first = msgspec.structs.replace(plan.stages[0], modules=("<script>",))
    capture = msgspec.structs.replace(plan.capture, model="<script>")
    hostile = msgspec.structs.replace(plan, stages=(first, *plan.stages[1:]), capture=capture)
    assert "<script>," not in paged(hostile) and "<h1>&lt;script&gt;</h1>" in paged(hostile)
    assert ">&lt;script&gt;</td>" in paged(hostile)


def test_memory_over_time_of_a_small_model_is_not_flat() -> None:
    heading = "Memory of each rank over the step"
    large = transformer_plan(4, 8, 10, memory_bytes=900 << 20)
    drawn = section(paged(large), heading)
    assert "The top of each row stands for 900.0 MiB." in drawn
    assert "cap-line" in drawn and "above the chart" not in drawn
    # As if a GPU took much more for any model than these ranks hold.
    more = Amount(expected=0, bound=4 << 30)
    memory = tuple(
        msgspec.structs.replace(rank, workspace=rank.workspace + more)
        for rank in large.prediction.memory
    )
    prediction = msgspec.structs.replace(large.prediction, memory=memory)
    small = section(paged(msgspec.structs.replace(large, prediction=prediction)), heading)
    largest = max(rank.total.expected for rank in memory)
    assert f"The top of each row stands for {size_text(largest * 5 // 4)}." in small
    assert "▴ bound and cap above the chart" in small and "cap-line" not in small


def test_blocks_are_told_by_stage() -> None:
    plan = transformer_plan(4, 4, 10)
    rows = section(paged(plan), "The model by stage").split('class="row"')[1:]
    assert [re.findall(r"<span>([^<]+)</span></span>", row) for row in rows][3] == [
        "layers.8",
        "layers.9",
        "norm",
        "lm_head",
    ]
    totals = [sum(map(float, re.findall(r"width:([0-9.]+)%", row))) for row in rows]
    times = [stage.forward_ns + stage.backward_ns for stage in plan.stages]
    assert totals == [pytest.approx(100 * time / max(times), abs=0.05) for time in times]
    hints = section(paged(plan), "The model by stage").count(", in part\nstage ")
    assert hints == 4, "two blocks are cut"


def test_a_large_plan_has_a_small_page() -> None:
    plan = transformer_plan(64, 8, 126, memory_bytes=4 << 30)
    page = paged(plan)
    assert len(page.encode()) < 250_000
    assert page.count('class="bars dense"') == 2, "a bar and its figures are on one line"


def test_another_plan_and_a_run_have_parts_of_their_own() -> None:
    plan, old = transformer_plan(4, 6, 10), transformer_plan(4, 6, 10, schedule="gpipe", moved=2)
    run = recorded_run(plan, recorded_step(plan, forward=2, backward=2))
    timeline = simulate_plan(plan)
    other = OtherPlan("old.json", old, simulate_plan(old))
    page = plan_page(plan, timeline, compare_run(plan, timeline, run), other)
    for name in ("predicted", "measured, step 0", "old.json"):
        assert f"<figcaption>{name}<span>" in page
    assert "1 step recorded on a device, torch 2.0." in section(page, "Predicted and measured")
    changed = section(page, "Against old.json")
    moved = r"<td[^>]*>model.layers.2 \(model_layers_2_mlp\)</td><td[^>]*>stage 0 → 1</td>"
    assert re.search(moved, changed)
    assert re.search(r"<td[^>]*>schedule</td><td[^>]*>gpipe → 1f1b</td>", changed)
    assert changed.count(">layers.9</span>") == 2, "both models are drawn"
    assert "<h2>Against" not in paged(plan) and "and measured</h2>" not in paged(plan)


def test_a_plan_in_other_units_has_no_timeline_beside() -> None:
    plan, old = transformer_plan(2, 4, 4), transformer_plan(2, 4, 4, time_unit="relative")
    page = plan_page(plan, simulate_plan(plan), other=OtherPlan("o", old, simulate_plan(old)))
    assert page.count('<canvas class="timeline"') == 1
    assert "Only one plan has times in seconds" in section(page, "Against o")


def test_a_plan_against_itself_says_so() -> None:
    plan = transformer_plan(2, 4, 4)
    page = plan_page(plan, simulate_plan(plan), other=OtherPlan("o", plan, simulate_plan(plan)))
    assert "The plans are the same." in section(page, "Against o")
