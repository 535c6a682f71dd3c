"""What differs between two plans, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Fingerprint, Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.setting import JointSearch, Setting, SettingResult
from pipecompile.ir.stage import EncodedNodes, Stage
from pipecompile.report.plan_diff import ChangeKind, compare_plans
from pipecompile.report.plan_diff_text import diff_headline, diff_markdown, diff_text
from pipecompile.report.tables import terminal_table

MakePlan = Callable[..., Plan]
replace = msgspec.structs.replace
MIB = 1 << 20


@pytest.fixture
def plan(make_plan: MakePlan) -> Plan:
    """Blocks 0 to 13 in four stages: 0-3, 4-6, 7-10 and 11-13."""
    return make_plan()


def with_figures(plan: Plan, **figures: Any) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, **figures))


def with_options(plan: Plan, **options: Any) -> Plan:
    return replace(plan, options=replace(plan.options, **options))


def with_stage(plan: Plan, index: int, **fields: Any) -> Plan:
    stages = list(plan.stages)
    # Which modules its nodes lie in is only for exports, and would be wrong for other nodes.
    runs = {"module_runs": ()} if "blocks" in fields else {}
    stages[index] = replace(stages[index], **runs, **fields)
    return replace(plan, stages=tuple(stages))


def held(parameters: int, activations: int, bound: int) -> RankMemory:
    return RankMemory(
        parameters=Amount(expected=parameters, bound=parameters),
        gradients=ZERO,
        optimizer=ZERO,
        activations=Amount(expected=activations, bound=activations + bound),
        buffers=ZERO,
        workspace=ZERO,
    )


def test_nodes_that_only_one_plan_copies_are_named(plan: Plan) -> None:
    copied = plan.stages[0].nodes[0]
    blocks = ((copied,), *plan.stages[1].blocks)
    new = with_stage(plan, 1, blocks=blocks, copies=(copied,))
    assert ("copies", "run in several stages", (), (copied,)) in changes(plan, new)
    assert f"copied nodes\n  run in several stages: none → {copied}" in diff_text(
        compare_plans(plan, new)
    )


def changes(old: Plan, new: Plan) -> list[tuple[ChangeKind, str, Any, Any]]:
    return [(c.kind, c.where, c.before, c.after) for c in compare_plans(old, new).changes]


def section(text: str, heading: str) -> list[str]:
    return text.partition(f"{heading}\n")[2].partition("\n\n")[0].splitlines()


def test_plans_with_the_same_content_are_the_same(make_plan: MakePlan) -> None:
    diff = compare_plans(make_plan(), make_plan())
    assert (diff.same, diff.changes, diff.notes) == (True, (), ())
    assert diff_text(diff) == diff_headline(diff) == "the plans are the same"
    assert diff_markdown(diff, "a → b") == "### a → b\n\nthe plans are the same"


@pytest.fixture
def pair(plan: Plan) -> tuple[Plan, Plan]:
    """Two plans: in the second one block 4 is in stage 0, and figures are other round numbers."""
    old = with_figures(
        plan,
        step_ns=80_000_000,
        span_ns=80_000_000,
        bubble=0.4,
        loads_ns=(10_000_000, 9_000_000, 8_000_000, 7_000_000),
        memory=(held(2 * MIB, 2 * MIB, MIB),) + 3 * (held(MIB, MIB, 0),),
    )
    new = with_figures(
        old,
        step_ns=88_000_000,
        span_ns=88_000_000,
        bubble=0.45,
        loads_ns=(12_000_000, 7_200_000, 8_000_000, 7_000_000),
        memory=(held(2 * MIB, 4 * MIB, MIB),) + 3 * (held(MIB, MIB, 0),),
    )
    first, second = plan.stages[:2]
    rest = {"blocks": second.blocks[1:], "modules": ("model.block.5-6",)}
    grown = {"blocks": (*first.blocks, second.blocks[0]), "modules": ("model.block.0-4",)}
    new = with_stage(with_stage(new, 1, **rest), 0, **grown)
    return old, with_options(new, objective="max-load", pin={"block.4": 0}, memory_bytes=None)


def test_a_module_that_moved(pair: tuple[Plan, Plan]) -> None:
    # Rank 0 holds 2 + 2 MiB, of which the bound is 1 MiB more; then 2 + 4 MiB.
    assert diff_text(compare_plans(*pair)) == "\n".join(
        [
            "step    before   after      change",
            "step   80.0 ms 88.0 ms      +10.0%",
            "bubble   40.0%   45.0% +5.0 points",
            "",
            "memory                 expected  change             bound change",
            "rank 0        4.0 MiB → 6.0 MiB  +50.0% 5.0 MiB → 7.0 MiB +40.0%",
            "  activations 2.0 MiB → 4.0 MiB +100.0% 3.0 MiB → 5.0 MiB +66.7%",
            "",
            "loads   before   after change",
            "rank 0 10.0 ms 12.0 ms +20.0%",
            "rank 1  9.0 ms  7.2 ms -20.0%",
            "",
            "moved",
            "  model.block.4: stage 1 → 0",
            "",
            "options",
            "  objective: variance → max-load",
            "  memory: 1GiB → no cap",
            "  pin block.4: none → 0",
        ]
    )


def test_the_other_way_around_values_are_swapped(pair: tuple[Plan, Plan]) -> None:
    there, back = changes(*pair), changes(*reversed(pair))
    assert [(kind, where, after, before) for kind, where, before, after in there] == back


def test_the_same_as_markdown(pair: tuple[Plan, Plan]) -> None:
    lines = diff_markdown(compare_plans(*pair), "old.json → new.json").splitlines()
    assert lines[:6] == [
        "### old.json → new.json",
        "",
        "| step | before | after | change |",
        "| :-- | --: | --: | --: |",
        "| step | 80.0 ms | 88.0 ms | +10.0% |",
        "| bubble | 40.0% | 45.0% | +5.0 points |",
    ]
    assert lines[-9:] == [
        "**moved**",
        "",
        "- `model.block.4`: stage 1 → 0",
        "",
        "**options**",
        "",
        "- `objective`: variance → max-load",
        "- `memory`: 1GiB → no cap",
        "- `pin block.4`: none → 0",
    ]


def test_the_headline(pair: tuple[Plan, Plan]) -> None:
    # step, bubble, rank 0 and its activations, two loads, one move, three options
    assert diff_headline(compare_plans(*pair)) == (
        "the plan differs: 10 changes; step 80.0 ms → 88.0 ms; bubble 40.0% → 45.0%"
    )


def test_on_a_terminal_tables_are_drawn_by_rich(pair: tuple[Plan, Plan]) -> None:
    text = diff_text(compare_plans(*pair), terminal_table)
    assert "─" in text
    assert text.endswith("pin block.4: none → 0")


def test_a_small_change_is_not_printed_as_none(plan: Plan) -> None:
    old = with_figures(plan, step_ns=92_610_000, memory=4 * (held(MIB, MIB, 0),))
    new = with_figures(plan, step_ns=92_610_001, memory=4 * (held(MIB + 1, MIB, 0),))
    lines = diff_text(compare_plans(old, new)).splitlines()
    assert lines[1] == "step 92.6 ms 92.6 ms  <0.1%"
    assert lines[4] == "rank 0        2.0 MiB  <0.1% 2.0 MiB  <0.1%"


def test_tables_fit_a_narrow_terminal(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    old = with_figures(plan, memory=4 * (held(512 << 10, 512 << 20, 0),))
    new = with_figures(plan, memory=4 * (held(256 << 10, 256 << 20, 512 << 20),))
    text = diff_text(compare_plans(old, new), terminal_table)
    assert "  activations" in text
    assert "512.0 MiB → 768.0 MiB" in text


def test_what_begins_at_nothing_has_no_relative_change(plan: Plan) -> None:
    old = with_figures(plan, loads_ns=(0, 1, 1, 1))
    new = with_figures(plan, loads_ns=(1_000, 1, 1, 1))
    assert diff_text(compare_plans(old, new)).splitlines() == [
        "loads  before  after change",
        "rank 0   0 ns 1.0 µs",
    ]


def test_the_span_is_listed_where_it_is_not_the_step(plan: Plan) -> None:
    old = with_figures(plan, step_ns=100, span_ns=100)
    assert [c[1] for c in changes(old, with_figures(plan, step_ns=90, span_ns=90))] == ["step"]
    assert [c[1] for c in changes(old, with_figures(plan, step_ns=90, span_ns=80))] == [
        "step",
        "largest span",
    ]


def recomputing(stage: Stage, *regions: tuple[int, int]) -> dict[str, Any]:
    nodes = tuple(stage.nodes[first:last] for first, last in regions)
    return {"recompute": "regions", "regions": nodes, "recompute_ns": 1_000_000 * len(nodes)}


def test_recompute_of_stages(plan: Plan) -> None:
    first = plan.stages[0]
    one = with_stage(plan, 0, **recomputing(first, (0, 2)))
    two = with_stage(plan, 0, **recomputing(first, (0, 2), (2, 4)))
    assert section(diff_text(compare_plans(plan, one)), "recompute") == [
        "  stage 0: nothing → 2 of 4 nodes in 1 region",
        "  stage 0, regions: none → block.0 … block.1",
        "  stage 0, extra time: 0 ns → 1.0 ms",
    ]
    assert section(diff_text(compare_plans(one, two)), "recompute") == [
        "  stage 0: 2 of 4 nodes in 1 region → 4 of 4 nodes in 2 regions",
        "  stage 0, regions: none → block.2 … block.3",
        "  stage 0, extra time: 1.0 ms → 2.0 ms (+100.0%)",
    ]
    # As many nodes in as many regions, but others.
    other = with_stage(plan, 0, **recomputing(first, (1, 3)))
    assert section(diff_text(compare_plans(one, other)), "recompute") == [
        "  stage 0, regions: block.0 … block.1 → block.1 … block.2"
    ]


def test_encodings_of_stages(plan: Plan) -> None:
    run = EncodedNodes(
        nodes=plan.stages[1].nodes[:1], encodings=("mask",), forward_ns=2_000, backward_ns=3_000
    )
    encoded = with_stage(plan, 1, encoded_runs=(run,))
    assert section(diff_text(compare_plans(plan, encoded)), "recompute") == [
        "  stage 1, encodings: none → block.4 (mask)",
        "  stage 1, extra time: 0 ns → 5.0 µs",
    ]


def test_another_schedule(make_plan: MakePlan, plan: Plan) -> None:
    found = changes(plan, make_plan(schedule="gpipe", microbatches=8))
    # The options say the same, so they are not listed; nor are orders of other microbatches.
    assert [change for change in found if change[0] in ("schedule", "option")] == [
        ("schedule", "schedule", "1f1b", "gpipe"),
        ("schedule", "microbatches", 4, 8),
    ]


def test_another_order_of_a_rank(plan: Plan) -> None:
    rows = [list(row) for row in plan.schedule.actions]
    assert [action for action in rows[0] if "_" not in action] == (
        ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"]
    )
    at = rows[0].index("0B1"), rows[0].index("0B2")
    rows[0][at[0]], rows[0][at[1]] = "0B2", "0B1"
    other = replace(plan, schedule=replace(plan.schedule, actions=tuple(map(tuple, rows))))
    assert changes(plan, other) == [
        ("schedule", "order of rank 0, action 5", ("0B1", "0B2", "0B3"), ("0B2", "0B1", "0B3"))
    ]
    assert diff_text(compare_plans(plan, other)) == (
        "schedule\n  order of rank 0, action 5: 0B1, 0B2, 0B3 → 0B2, 0B1, 0B3"
    )


def test_options_are_named_as_in_python(plan: Plan) -> None:
    other = with_options(
        plan,
        memory_bytes=(16 << 30, 24 * 10**9, 1 << 30, 1 << 30),
        groups=(("h.0", "h.1"), ("ln_f",)),
        leaf=("Attention", "Norm"),
        master_weights=True,
        optimizer="adamw",
    )
    assert diff_text(compare_plans(plan, other)).splitlines() == [
        "options",
        "  memory: 1GiB → 16GiB,24GB,1GiB,1GiB",
        "  no_split: none → h.0,h.1; ln_f",
        "  leaf: none → Attention, Norm",
        "  optimizer: none → adamw",
        "  master_weights: no → yes",
    ]


def test_numbers_have_a_relative_change_but_stages_have_none(plan: Plan) -> None:
    old = with_options(plan, pin={"a": 1}, memory_bytes=1 << 30)
    new = with_options(plan, pin={"a": 2}, memory_bytes=3 << 29)
    assert diff_text(compare_plans(old, new)).splitlines()[1:] == [
        "  memory: 1GiB → 1536MiB (+50.0%)",
        "  pin a: 1 → 2",
    ]


def test_what_the_plan_was_made_for(plan: Plan) -> None:
    fingerprint = Fingerprint(graph="1" * 64, costs="2" * 64)
    capture = replace(plan.capture, verified=False, model="Net", notes=("one", "two"))
    other = replace(
        plan, fingerprint=fingerprint, capture=capture, microbatch_shapes=((4, 128), (4,))
    )
    costs = plan.fingerprint.costs[:12]
    assert diff_text(compare_plans(plan, other)).splitlines() == [
        "model",
        "  fingerprint: 000000000000… → 111111111111…",
        "  microbatch shapes: 2,128 → 4,128; 4",
        "  capture, verified: yes → no",
        "  capture, model: none → Net",
        "  capture, notes: none → one, two",
        "",
        "costs",
        f"  fingerprint: {costs}… → 222222222222…",
    ]


def test_links(plan: Plan) -> None:
    slow = replace(plan, links=Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=10_000)))
    assert diff_text(compare_plans(plan, slow)) == (
        "links\n  links: 10.0 GB/s + 10.0 µs → 1.0 GB/s + 10.0 µs"
    )
    latencies = [[10_000 * (1 + (one + other) % 2) for one in range(4)] for other in range(4)]
    rows = tuple(map(tuple, latencies))
    matrix = replace(plan, links=replace(plan.links, latency_ns=rows))
    # Slowest and fastest link are the same, in another place.
    turned = replace(matrix, links=replace(plan.links, latency_ns=(*rows[1:], rows[0])))
    assert diff_text(compare_plans(matrix, turned)).endswith("→ other values between some ranks")


def test_how_good_the_cut_is(plan: Plan) -> None:
    other = replace(plan, search=replace(plan.search, gap=0.125, proven=False))
    assert diff_text(compare_plans(plan, other)) == (
        "search\n  gap: 0.00% → 12.50%\n  proven: yes → no"
    )


def test_another_choice_among_settings(plan: Plan) -> None:
    sizes = {"ranks": 4, "stages_per_rank": 1, "replicas": 1, "microbatches": 4}
    setting = Setting(**sizes, schedule="1f1b", recompute="none")
    best = SettingResult(setting=setting, status="planned", bound_ns=5, step_ns=6)
    joint = JointSearch(
        devices="4xh100", settings=3, bound_ns=5, gap=0.125, counts={"planned": 2, "bound": 1}
    )
    fewer = replace(joint, best=(best,), counts={"planned": 1, "bound": 2}, bound_ns=4)
    plans = [replace(plan, joint=each) for each in (joint, fewer)]
    assert changes(plan, plans[0]) == [("choice", "settings", None, 3)]
    assert diff_text(compare_plans(*plans)).splitlines() == [
        "choice among settings",
        "  no step below: 5 ns → 4 ns (-20.0%)",
        "  settings, cannot be shorter: 1 → 2 (+100.0%)",
        "  settings, planned: 2 → 1 (-50.0%)",
        "  settings listed as best: 0 → 1",
    ]


def test_an_edited_plan_never_passes_as_the_same(plan: Plan) -> None:
    other = with_stage(plan, 2, forward_ns=plan.stages[2].forward_ns + 1)
    other = replace(other, search=replace(plan.search, method="guess"))
    forward = plan.stages[2].forward_ns
    assert changes(plan, other) == [
        ("other", "stages[2].forward_ns", forward, forward + 1),
        ("other", "search.method", plan.search.method, "guess"),
    ]
    assert diff_text(compare_plans(plan, other)).startswith("only these fields differ")


def test_plans_for_other_ranks_and_models(make_plan: MakePlan, plan: Plan) -> None:
    # With k = 2 the model has blocks 0 to 7, in stages of 4; with k = 4 it has 14.
    small = make_plan(k=2)
    assert [stage.modules for stage in small.stages] == [("model.block.0-3",), ("model.block.4-7",)]
    diff = compare_plans(plan, small)
    assert diff.notes == (
        "the plans are for 4 and 2 ranks: of memory and loads the largest of all ranks is compared",
        "the plans have 4 and 2 stages: recompute is compared for all stages together",
        "the plans are for different graphs: stages are compared by module",
    )
    found = changes(plan, small)
    assert [c[1] for c in found if c[0] in ("memory", "load")] == ["largest rank"] * 2
    # Stages were 0-3, 4-6, 7-10 and 11-13: block 7 alone comes from stage 2, and 8 to 13 are gone.
    assert section(diff_text(diff), "moved") == [
        "  model.block.7: stage 2 → 1",
        "  model.block.8 … model.block.10: gone, was in stage 2",
        "  model.block.11 … model.block.13: gone, was in stage 3",
    ]
    assert not any(c[0] == "recompute" for c in found)
    recomputed = make_plan(k=2, recompute="stage")
    ((_, where, before, after), *_) = (c for c in changes(plan, recomputed) if c[0] == "recompute")
    assert (where, before, after) == ("stages that recompute", "0 of 4", "1 of 2")


def test_a_module_that_is_cut_lies_in_several_stages(plan: Plan) -> None:
    cut = with_stage(
        plan,
        1,
        modules=("model.block.3-6",),
        blocks=(("other",), *plan.stages[1].blocks),
    )
    lines = section(diff_text(compare_plans(plan, cut)), "moved")
    assert lines == ["  model.block.3: stage 0 → 0, 1"]
    assert section(diff_text(compare_plans(cut, plan)), "moved") == [
        "  model.block.3: stages 0, 1 → 0"
    ]


def test_models_that_share_nothing(plan: Plan) -> None:
    other = plan
    for index in range(plan.k):
        fields = {"blocks": ((f"n{index}",),), "modules": (f"other.{index}",)}
        other = with_stage(other, index, **fields)
    diff = compare_plans(plan, other)
    assert diff.notes == ("the plans share no module: stages are not compared",)
    assert not diff.same


def test_relative_units_are_not_compared_with_seconds(make_plan: MakePlan, plan: Plan) -> None:
    flops = with_figures(make_plan(costs="flops"), step_ns=2_000, span_ns=2_000)
    diff = compare_plans(with_figures(plan, step_ns=3_000, span_ns=3_000), flops)
    assert diff.time_units == ("ns", "relative")
    assert diff_text(diff).splitlines()[:4] == [
        "only one plan has times in seconds: times have no relative change",
        "",
        "step before       after change",
        "step 3.0 µs 2.0 k units",
    ]
