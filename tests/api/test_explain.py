"""Why a step is as long as it is, and what would change it: against all cuts, and against plans
that are made by hand with the changed option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from cuts import chain, cuts
from hypothesis import given
from hypothesis import strategies as st

import pipecompile
from pipecompile import Explanation, InputError, Plan, StalePlanError, explain
from pipecompile.api.choices import requested_options
from pipecompile.ir.explanation import WhatIf
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Faster, Provenance
from pipecompile.partition.groups import grouped
from pipecompile.partition.objective import stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.planner.draft import draft
from pipecompile.report.explanation_text import explanation_markdown, explanation_text
from pipecompile.report.plan_facts import outcome_of
from pipecompile.schedule.simulator import simulate_plan

GIB = 2**30


def planned(graph: CostGraph, links: Links = FREE, **choices: Any) -> Plan:
    """The plan of a graph; groups of nodes are put into the graph as a capture does."""
    options = requested_options(**{"costs": "flops", "objective": "max-load", **choices})
    return draft(
        grouped(graph, options.groups),
        options,
        graph_digest="",
        capture=Provenance(verified=False, target="net.py:target"),
        microbatch_shapes=[],
        links=links,
    )


def holding(times: Sequence[int], saved: Sequence[int]) -> CostGraph:
    """A chain whose nodes save storages of these bytes."""
    graph = chain(times)
    nodes = (msgspec.structs.replace(n, saved=(i,)) for i, n in enumerate(graph.nodes))
    return msgspec.structs.replace(graph, nodes=tuple(nodes), storages=tuple(saved))


def only(explanation: Explanation, kind: str) -> WhatIf:
    (found,) = (what_if for what_if in explanation.what_ifs if what_if.kind == kind)
    return found


def least_load(graph: CostGraph, k: int, **constraints: Any) -> int:
    """The largest load of the best of all cuts."""
    problem = PartitionProblem(graph, k, "max-load", **constraints)
    return min(max(stage_loads(problem, cut)) for cut in cuts(problem))


def test_a_node_that_no_cut_splits() -> None:
    graph = chain([20, 20, 20, 90, 10])
    plan = planned(graph, k=3, microbatches=6)
    found = explain(plan, graph)
    heaviest = found.heaviest
    assert (heaviest.load_ns, heaviest.mean_ns) == (90, 160 // 3)
    assert heaviest.least_ns == 90 == least_load(graph, 3)
    assert found.undivided is not None
    assert (found.undivided.node, found.undivided.ns, found.undivided.by) == ("n3", 90, "node")
    assert found.moves == ()
    text = explanation_text(found)
    assert "n3 takes 90 ns, 1.70 × the mean load, and no cut splits a node" in text
    # Neither another stage nor anything else makes it lighter.
    assert all(w.after is None or w.after.load_ns >= 90 for w in found.what_ifs)


def test_a_pin_that_binds_is_named_and_its_removal_is_the_best_of_all_cuts() -> None:
    graph = chain([10, 10, 10, 10, 10, 10])
    plan = planned(graph, k=3, microbatches=6, pin={"n4": 1, "n0": 0})
    found = explain(plan, graph)
    assert found.before.load_ns == 30 == least_load(graph, 3, pin={"n4": 1, "n0": 0})
    without, harmless = (w for w in found.what_ifs if w.kind == "pin")
    assert without.change == "without pin n4=1"
    assert without.after is not None and harmless.after is not None
    assert without.after.load_ns == 20 == least_load(graph, 3, pin={"n0": 0})
    assert harmless.after.load_ns == 30 == least_load(graph, 3, pin={"n4": 1})
    assert [c.where for c in found.constraints if c.here] == ["n4=1"]
    assert explanation_text(found).count("binds: ") == 1
    assert found.first == without.command
    assert "--pin n0=0" in without.command and "n4" not in without.command


def test_a_group_that_binds_is_named_and_its_removal_is_the_best_of_all_cuts() -> None:
    graph = chain([10, 10, 10, 10, 10, 10])
    plan = planned(graph, k=3, microbatches=6, no_split=[["n1", "n2", "n3"], ["n4", "n5"]])
    found = explain(plan, graph)
    assert found.before.load_ns == 30
    assert found.undivided is not None
    assert (found.undivided.nodes, found.undivided.by) == (3, "group")
    first, second = (w for w in found.what_ifs if w.kind == "group")
    assert first.after is not None and second.after is not None
    assert first.after.load_ns == 20 == least_load(graph, 3, together=(("n4", "n5"),))
    assert second.after.load_ns == 30 == least_load(graph, 3, together=(("n1", "n2", "n3"),))
    assert "binds: without group n1,n2,n3" in explanation_text(found)


def test_a_cap_that_binds() -> None:
    # Each of the first nodes saves much: the even cut does not fit, and another one does.
    graph = holding([10, 10, 10, 10], [GIB, GIB, GIB // 64, GIB // 64])
    free = planned(graph, k=2, microbatches=2)
    needed = max(memory.total.bound for memory in free.prediction.memory)
    # More than what the allocator takes besides: else only the whole of a rank shows it.
    cap = needed - 3 * GIB // 4
    plan = planned(graph, k=2, microbatches=2, memory=cap)
    assert (free.prediction.loads_ns, plan.prediction.loads_ns) == ((20, 20), (10, 30))
    found = explain(plan, graph)
    more = only(found, "memory")
    assert more.after is not None
    assert (more.after.load_ns, found.before.load_ns) == (20, 30)
    assert any("over its cap" in move.obstacle for move in found.moves)
    assert "binds: 1 GiB more on each rank" in explanation_text(found)
    assert found.tightest.cap == cap
    # Of a plan without a cap no memory is missing.
    assert only(explain(free, graph), "memory").reason == "there is no cap"


def test_caps_are_named_only_where_ranks_may_lack_memory() -> None:
    graph = holding([10, 10, 10, 30], [GIB] * 4)
    first, second = planned(graph, k=2, microbatches=2).prediction.memory
    # Two microbatches are in flight on the first rank, and one on the second.
    all_on_first = first.total.bound + 2 * second.total.bound
    tight, empty = (
        explain(planned(graph, k=2, microbatches=2, memory=cap), graph)
        for cap in (all_on_first - 1, all_on_first)
    )
    assert [constraint.kind for constraint in tight.constraints] == ["memory"]
    assert empty.constraints == ()
    texts = [explanation_text(msgspec.structs.replace(e, what_ifs=())) for e in (tight, empty)]
    assert ["caps may forbid" in text for text in texts] == [True, False]
    assert only(tight, "memory").after is not None
    assert only(empty, "memory").reason == "no rank lacks memory"


CHANGES: dict[str, dict[str, Any]] = {
    "memory": {"memory": 2 * GIB},
    "stages": {"k": 4},
    "schedule": {"schedule": "search"},
    "pin": {"pin": {}},
    "group": {"no_split": []},
    "granularity": {"granularity": "operators"},
    "parameters": {"parameters_everywhere": False},
}


def test_each_change_is_the_plan_that_is_made_by_hand() -> None:
    graph = chain([7, 3, 8, 2, 9, 4, 6, 5], size=3, held=[GIB // 64] * 8)
    links = Links.of(Link(latency_ns=2))
    choices: dict[str, Any] = {"k": 3, "microbatches": 4, "memory": GIB, "pin": {"n1": 0}}
    choices |= {"no_split": [["n2", "n3"]], "granularity": "blocks", "parameters_everywhere": True}
    plan = planned(graph, links, **choices)
    found = explain(plan, graph)
    assert found.before == outcome_of(plan)
    for kind, change in CHANGES.items():
        by_hand = planned(graph, links, **{**choices, **change})
        assert only(found, kind).after == outcome_of(by_hand), kind
    next_cut = only(found, "next cut")
    node, stage = next_cut.change.removeprefix("the next-best cut: ").split(" in stage ")
    by_hand = planned(graph, links, **{**choices, "pin": {"n1": 0, node: int(stage)}})
    assert next_cut.after == outcome_of(by_hand)
    assert by_hand.assignment != plan.assignment


def test_the_objective_is_tried_that_the_planner_has_found_faster() -> None:
    # As a plan has it whose cut is slower by the simulated step than another objective's.
    graph = chain([9, 1, 1, 1, 9, 9, 1, 1])
    plan = planned(graph, k=3, microbatches=2, objective="variance")
    named = msgspec.structs.replace(
        plan.search, faster=Faster(objective="max-load", step_ns=plan.prediction.step_ns)
    )
    found = explain(msgspec.structs.replace(plan, search=named), graph)
    by_hand = planned(graph, k=3, microbatches=2, objective="max-load")
    assert only(found, "objective").after == outcome_of(by_hand)
    assert "objective" not in {what_if.kind for what_if in explain(plan, graph).what_ifs}


TIMES = st.lists(st.integers(0, 9), min_size=4, max_size=7)


@given(TIMES, st.integers(1, 3), st.sampled_from(["1f1b", "gpipe"]), st.integers(0, 5))
def test_causes_sum_to_the_idle_time_and_the_least_load_is_one(
    times: list[int], k: int, schedule: str, latency: int
) -> None:
    graph = chain([time + 1 for time in times], size=1)
    links = Links.of(Link(latency_ns=latency))
    plan = planned(graph, links, k=k, microbatches=3, schedule=schedule)
    found, timeline = explain(plan), simulate_plan(plan)
    idle = plan.ranks * timeline.makespan_ns - sum(timeline.busy_ns)
    assert found.idle.total_ns == idle
    assert found.before.bubble == pytest.approx(idle / (plan.ranks * timeline.makespan_ns))
    assert found.heaviest.least_ns is not None
    assert found.heaviest.least_ns <= least_load(graph, k)


def test_without_a_target_nothing_is_solved() -> None:
    plan = planned(chain([10, 10, 30]), k=2, pin={"n0": 0})
    found = explain(plan)
    assert (found.what_ifs, found.moves, found.undivided, found.first) == ((), (), None, "")
    text = explanation_text(found, "p.json")
    assert text.endswith("\n  pipecompile explain p.json net.py:target")
    assert "may hold it: pin n0=0, elsewhere" in text


def test_ranks_with_several_stages_are_explained_together() -> None:
    graph = chain([4, 8, 4, 8, 4, 8, 4, 8])
    plan = planned(graph, k=4, stages_per_rank=2, schedule="interleaved-1f1b", microbatches=4)
    found = explain(plan, graph)
    assert len(found.heaviest.stages) == 2
    more = only(found, "stages")
    assert more.change == "k=6, on 3 ranks"
    assert more.after is not None and more.after.ranks == 3


def test_what_cannot_be_tried_has_its_reason() -> None:
    graph = chain([10, 20, 30, 40])
    matrix = Links(bandwidth_bytes_per_s=((None,) * 2,) * 2, latency_ns=((1,) * 2,) * 2)
    plan = planned(graph, matrix, k=2, schedule="search", memory=[GIB, 2 * GIB])
    found = explain(plan, graph)
    assert only(found, "stages").reason == "the caps are listed for the ranks of the plan"
    assert only(found, "schedule").reason == "it is searched already"
    assert "name the model" in only(found, "microbatches").reason
    inference = explain(planned(graph, k=2, objective="throughput"), graph)
    assert only(inference, "schedule").reason == "forwards have one order"
    capless = planned(graph, matrix, k=2)
    assert "links are for 2 ranks" in only(explain(capless, graph), "stages").reason
    assert "at most 4 stages" in only(explain(planned(graph, k=4), graph), "stages").reason


def test_a_layout_fixes_the_cut() -> None:
    graph = chain([10, 10, 10, 10])
    nodes = (msgspec.structs.replace(n, module=f"m{i}") for i, n in enumerate(graph.nodes))
    graph = msgspec.structs.replace(graph, nodes=tuple(nodes))
    plan = planned(graph, layout=[["m0"], ["m1", "m2", "m3"]], layout_format="json")
    found = explain(plan, graph)
    assert only(found, "next cut").reason == "the layout fixes the cut"
    assert only(found, "stages").reason == "the layout has its own number of stages"
    free = only(found, "layout").after
    assert free is not None
    assert (found.before.load_ns, free.load_ns) == (30, 20)
    # Where the layout's cut might go is shown as if it were free to.
    assert [move.obstacle for move in found.moves] == [""]
    # Its cut was not searched: nothing about it is proven.
    text = explanation_text(found)
    assert ", of the layout's cut" in text and "proven" not in text


def test_a_plan_that_no_option_holds_says_so() -> None:
    found = explain(planned(chain([10, 10, 10, 11]), k=2))
    assert found.constraints == found.moves == ()
    title = "why it is not lighter\n  no option of the plan holds it; with TARGET"
    assert title in explanation_text(found)


def test_the_time_limit_ends_what_is_tried() -> None:
    graph = chain([10, 20, 30])
    found = explain(planned(graph, k=2, pin={"n0": 0}), graph, time_limit=1e-9)
    assert all(what_if.after is None for what_if in found.what_ifs)
    assert "the time limit of 1e-09 s had passed" in only(found, "pin").reason
    with pytest.raises(InputError, match="a time limit of 0 s"):
        explain(planned(graph, k=2), graph, time_limit=0)


def test_another_graph_is_refused_and_other_costs_are_said() -> None:
    graph = chain([10, 20, 30])
    plan = planned(graph, k=2)
    with pytest.raises(StalePlanError, match="is of another model"):
        explain(plan, chain([10, 20, 30, 40]))
    slower = chain([10, 20, 60])
    found = explain(plan, slower)
    assert found.before == outcome_of(planned(slower, k=2))
    assert "the costs are not those" in found.notes[0]


def test_markdown_has_the_same_figures_as_text() -> None:
    graph = chain([10, 20, 30, 5])
    found = explain(planned(graph, k=2), graph)
    text, markdown = explanation_text(found), explanation_markdown(found, "plan.json")
    assert markdown.startswith("### plan.json\n\n**step ")
    assert max(map(len, text.splitlines())) <= 100
    for what_if in found.what_ifs:
        if what_if.after is not None:
            assert what_if.change in text and f"| {what_if.change} |" in markdown
    assert "| as it is |" in markdown


def test_long_names_are_cut_off_and_lines_wrapped() -> None:
    graph = chain([10] * 40)
    names = [f"n{index}" for index in range(5, 35)]
    found = explain(planned(graph, k=2, no_split=[names], pin={"n0": 0}), graph)
    assert max(map(len, explanation_text(found).splitlines()[:-1])) <= 100
    assert only(found, "group").change == f"without group {','.join(names)}"


def test_it_is_public() -> None:
    assert pipecompile.explain is explain
