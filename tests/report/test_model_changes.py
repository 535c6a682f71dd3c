"""What has changed in a model since its plan was made, by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.finding import Finding
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Plan
from pipecompile.report.model_changes import (
    Outline,
    OutlinedNode,
    drift_findings,
    memory_drift_findings,
    node_findings,
    outline,
    plan_outline,
)

replace = msgspec.structs.replace


def model(*layers: str, ns: Mapping[str, int] | None = None, first: int = 0) -> Outline:
    """Layers h.0, h.1, …: each letter is a node and says what that does. Names are numbered from
    `first` on.
    """
    names = iter(range(first, 1000))
    nodes = [
        OutlinedNode(f"h.{layer}.part", f"{letter}_{next(names)}", letter)
        for layer, letters in enumerate(layers)
        for letter in letters
    ]
    return outline(nodes, ns)


def texts(findings: Sequence[Finding]) -> list[str]:
    assert not any(finding.passed for finding in findings)
    return [finding.message for finding in findings]


def test_other_numbers_in_names_are_no_change() -> None:
    assert node_findings(model("abc", "abc"), model("abc", "abc", first=5)) == []


def test_a_changed_layer_is_one_line() -> None:
    (finding,) = node_findings(model("abc", "abc"), model("abc", "axc"))
    assert (finding.code, finding.message) == ("nodes", "h.1: 1 of 3 nodes changed (x_4)")
    assert (finding.value, finding.limit) == (1, 0)


def test_nodes_that_came_and_went_are_named_in_their_layer() -> None:
    assert texts(node_findings(model("abcd"), model("abed"))) == ["h.0: 1 of 4 nodes changed (e_2)"]
    assert texts(node_findings(model("abd"), model("abcd"))) == ["h.0: 1 came (c_2)"]
    assert texts(node_findings(model("abcdefg"), model("ag"))) == ["h.0: 5 went (b_1, c_2, …, f_5)"]


def test_layers_that_changed_alike_are_one_line() -> None:
    found = node_findings(model("ab", "ab", "ab", "ab"), model("ax", "ax", "ab", "axy", "ab"))
    assert texts(found) == [
        "h.0 … h.1 (2 blocks): each 1 of 2 nodes changed (x_1)",
        "h.3: 1 of 3 nodes changed (x_7), 1 came (y_8)",
        "h.4: came, 2 nodes",
    ]
    assert texts(node_findings(model("ab", "cd", "cd"), model("ab"))) == [
        "h.1 … h.2 (2 blocks): went, each 2 nodes"
    ]


def test_blocks_that_are_no_neighbours_are_no_range() -> None:
    found = node_findings(model("ab", "ab", "ab", "ab"), model("ax", "ab", "ax", "ax"))
    assert texts(found) == ["h.0, h.2, h.3 (3 blocks): each 1 of 2 nodes changed (x_1)"]


def test_what_a_changed_layer_takes_is_said_where_it_is_known() -> None:
    old = model("ab", "ab", ns={"h.0.part": 2000, "h.1.part": 3000})
    new = model("ab", "ax", ns={"h.0.part": 2000, "h.1.part": 4000})
    assert texts(node_findings(old, new)) == ["h.1: 1 of 2 nodes changed (x_3), 3.0 µs → 4.0 µs"]
    assert texts(node_findings(old, new, "relative")) == [
        "h.1: 1 of 2 nodes changed (x_3), 3.0 k units → 4.0 k units"
    ]
    assert "µs" not in texts(node_findings(old, model("ab", "ax")))[0]


LAYERS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=5)


@given(LAYERS, LAYERS)
def test_the_counts_are_those_of_the_layers(old: list[str], new: list[str]) -> None:
    count = sum(int(finding.value or 0) for finding in node_findings(model(*old), model(*new)))
    # At least as many as the sizes of layers differ by, at most as many as there are.
    pairs = [
        (old[i] if i < len(old) else "", new[i] if i < len(new) else "")
        for i in range(max(len(old), len(new)))
    ]
    different = [pair for pair in pairs if pair[0] != pair[1]]
    assert sum(abs(len(a) - len(b)) for a, b in different) <= count
    assert count <= sum(max(len(a), len(b)) for a, b in different)
    assert (count == 0) == (old == new)


def test_times_that_drifted_by_more_than_the_limit_are_named() -> None:
    old = model("ab", "ab", "ab", "cd", ns={f"h.{i}.part": 1000 for i in range(4)})
    times = {"h.0.part": 1000, "h.1.part": 1100, "h.2.part": 1100, "h.3.part": 900}
    new = model("ab", "ab", "ab", "cd", ns=times)
    assert texts(drift_findings(old, new, 0.05)) == [
        "h.1 … h.2 (2 blocks): time +10.0% (2.0 µs → 2.2 µs), over 5.0%",
        "h.3: time -10.0% (1.0 µs → 900 ns), over 5.0%",
    ]
    (within,) = drift_findings(old, new, 0.1)
    assert (within.passed, within.value, within.limit) == (True, 0.1, 0.1)
    assert "the largest drift is +10.0% of h.1" in within.message


def test_a_block_with_other_nodes_has_not_drifted() -> None:
    old = model("ab", ns={"h.0.part": 1000})
    assert drift_findings(old, model("ax", ns={"h.0.part": 2000}), 0.05) == []
    assert drift_findings(old, model("ab"), 0.05) == []


def with_digests(plan: Plan) -> Plan:
    stages = []
    for stage in plan.stages:
        names = iter(stage.nodes)
        runs = [
            replace(run, digests=tuple(f"does {next(names)}" for _ in range(run.nodes)))
            for run in stage.module_runs
        ]
        stages.append(replace(stage, module_runs=tuple(runs)))
    return replace(plan, stages=tuple(stages))


def test_the_outline_of_a_plan_has_its_nodes_in_order(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    assert plan_outline(plan) is None
    found = plan_outline(with_digests(plan))
    assert found is not None
    nodes = [node for block in found.values() for node in block.nodes]
    assert [node.name for node in nodes] == [f"block.{i}" for i in range(14)]
    assert all(node.digest == f"does {node.name}" for node in nodes)
    assert list(found) == [block_of(f"model.block.{i}") for i in range(14)]
    total = sum(stage.forward_ns + stage.backward_ns for stage in plan.stages)
    assert sum(block.ns or 0 for block in found.values()) == total


def test_memory_may_shrink_but_not_grow_beyond_the_limit(make_plan: Callable[..., Plan]) -> None:
    held = [
        make_plan(schedule="gpipe", microbatches=microbatches, recompute="none", memory_bytes=None)
        for microbatches in (4, 8)
    ]
    bounds = [[rank.total.bound for rank in plan.prediction.memory] for plan in held]
    growth = [after / before - 1 for before, after in zip(*bounds, strict=True)]
    assert min(growth) > 0
    assert memory_drift_findings(held[1], held[0], 0) == []
    assert [finding.rank for finding in memory_drift_findings(*held, 0)] == [0, 1, 2, 3]
    # Between the least and the next growth: one of the four ranks is within it.
    limit = sum(sorted(growth)[:2]) / 2
    over = memory_drift_findings(*held, limit)
    assert [finding.rank for finding in over] == [r for r in range(4) if growth[r] > limit]
    assert len(over) == 3
    assert all("may need" in text and "in the plan, over" in text for text in texts(over))
