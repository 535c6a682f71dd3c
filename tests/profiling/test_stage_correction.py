"""Stage correction with stages whose true times are known: it ends, adds up exactly, and moves the
cut rightly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.ir.schedule import Kind
from pipecompile.planner.draft import draft
from pipecompile.profiling.scaled_costs import Times, apportioned, scaled
from pipecompile.profiling.stage_correction import ROUNDS, DoesNotFitError, correct_stages
from tests.sweeps import examples

OPTIONS = Options(
    k=2,
    microbatches=4,
    schedule="1f1b",
    objective="max-load",
    recompute="none",
    memory_bytes=None,
    costs="measured",
)


def chain(times: Sequence[int]) -> CostGraph:
    """Nodes in a row, each with a parameter, whose backward takes twice the forward and its halves
    one forward.
    """
    nodes = tuple(
        Node(
            name=f"n{index}",
            forward_ns=time,
            backward_ns=2 * time,
            backward_input_ns=time,
            backward_weight_ns=time,
            parameter_bytes=4,
            saved_bytes=0,
            group=None,
            parameters=(f"p{index}",),
        )
        for index, time in enumerate(times)
    )
    parameters = tuple(
        Parameter(name=f"p{index}", bytes=4, trainable=True) for index in range(len(times))
    )
    tensors = tuple(
        Tensor(producer=f"n{index}", consumers=(f"n{index + 1}",), bytes=1, gradient_bytes=1)
        for index in range(len(times) - 1)
    )
    return CostGraph(nodes=nodes, tensors=tensors, parameters=parameters)


def planned(graph: CostGraph, *, assignment: Mapping[str, int] | None = None) -> Plan:
    return draft(
        graph,
        OPTIONS,
        graph_digest="",
        capture=Provenance(verified=True),
        microbatch_shapes=[(1,)],
        assignment=assignment,
    )


def truth(true_ns: Mapping[str, int], plan: Plan) -> list[Times]:
    """Stages that take exactly what their nodes truly take."""
    sums = [sum(true_ns[name] for name in stage.nodes) for stage in plan.stages]
    return [{Kind.FORWARD: total, Kind.BACKWARD: 2 * total, Kind.REDUCE: 5} for total in sums]


def test_the_cut_moves_away_from_the_stage_that_takes_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    graph = chain([10] * 8)
    true_ns = {node.name: 30 if index < 4 else 10 for index, node in enumerate(graph.nodes)}
    first, last = planned(graph), correct_stages(graph, planned, lambda plan: truth(true_ns, plan))
    assert [len(stage.nodes) for stage in first.stages] == [4, 4]
    assert [len(stage.nodes) for stage in last.stages] == [3, 5]
    assert [stage.forward_ns for stage in last.stages] == [90, 70]
    assert [stage.per_step_ns for stage in last.stages] == [5, 5]
    assert "2 rounds, stages took 2.00× their nodes' sum" in caplog.text


def test_a_cut_that_stays_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    graph = chain([10] * 8)
    plan = correct_stages(
        graph, planned, lambda plan: truth({node.name: 13 for node in graph.nodes}, plan)
    )
    assert [stage.backward_ns for stage in plan.stages] == [104, 104]
    assert "1 round, stages took 1.30×" in caplog.text


def test_stages_that_do_not_fit_leave_the_best_of_what_was_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph, asked = chain([10] * 8), list[Plan]()
    true_ns = {node.name: 30 if index < 4 else 10 for index, node in enumerate(graph.nodes)}

    def measure(plan: Plan, fitting: int) -> list[Times]:
        asked.append(plan)
        if len(asked) > fitting:
            raise DoesNotFitError("rank 1 is full")
        return truth(true_ns, plan)

    assert correct_stages(graph, planned, lambda plan: measure(plan, 0)) == planned(graph)
    assert "stage correction is left out: rank 1 is full" in caplog.text
    asked.clear()
    plan = correct_stages(graph, planned, lambda plan: measure(plan, 1))
    assert plan.assignment == asked[0].assignment
    assert [stage.forward_ns for stage in plan.stages] == [120, 40]


def test_a_ratio_that_is_too_high_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    graph = chain([10] * 8)
    slow, fast = ({node.name: time for node in graph.nodes} for time in (2000, 12))
    attempts = iter([slow, fast])
    plan = correct_stages(graph, planned, lambda plan: truth(next(attempts), plan))
    assert [stage.forward_ns for stage in plan.stages] == [48, 48]
    assert "stages took 200× their nodes' sum: they are measured again" in caplog.text
    assert "stage correction: 1 round, stages took 1.20×" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_ratio_that_stays_too_high_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    graph = chain([10_000] * 8)
    slow = {node.name: 2_000_000 for node in graph.nodes}
    correct_stages(graph, planned, lambda plan: truth(slow, plan))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "stages took 200× their nodes' sum (48.0 ms instead of 240.0 µs a microbatch), measured "
        "twice" in warning.getMessage()
    )
    assert "plan again when it is idle" in warning.getMessage()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=ROUNDS * 2, max_size=ROUNDS * 2))
def test_it_ends_whatever_is_measured_and_keeps_the_best_that_was(times: list[int]) -> None:
    graph, given_times = chain([7, 1, 9, 4, 4, 8, 2]), iter(times)
    run = list[tuple[dict[str, int], list[Times]]]()

    def measure(plan: Plan) -> list[Times]:
        if len(run) == 1 and run[0][0] == plan.assignment:
            return run[0][1]  # far above the nodes' sum, so it is measured twice
        found: list[Times] = [
            {Kind.FORWARD: time, Kind.BACKWARD: time}
            for time in (next(given_times), next(given_times))
        ]
        run.append((plan.assignment, found))
        return found

    plan = correct_stages(graph, planned, measure)
    assert len(run) <= ROUNDS
    cuts = [assignment for assignment, _ in run]
    assert all(left != right for index, left in enumerate(cuts) for right in cuts[:index]), (
        "no cut is run twice"
    )
    steps = [step_of(found) for _, found in run]
    assert plan.prediction.step_ns == min(steps)
    assert plan.assignment in [
        cut for cut, step in zip(cuts, steps, strict=True) if step == min(steps)
    ]


def step_of(times: Sequence[Times]) -> int:
    """1F1B on two ranks with four microbatches and free transfers, by hand."""
    (f, b), (g, c) = ((each[Kind.FORWARD], each[Kind.BACKWARD]) for each in times)
    ends = {"a": 0, "b": 0}
    done: dict[str, int] = {}
    rows = {
        "a": ["f0", "f1", "B0", "f2", "B1", "f3", "B2", "B3"],
        "b": ["g0", "C0", "g1", "C1", "g2", "C2", "g3", "C3"],
    }
    duration = {"f": f, "B": b, "g": g, "C": c}
    needs = {"g": "f", "B": "C", "C": "g"}
    while any(rows.values()):
        for rank, row in rows.items():
            while row:
                kind, number = row[0]
                need = needs.get(kind)
                if need is not None and need + number not in done:
                    break
                start = max(ends[rank], done.get(f"{need}{number}", 0))
                done[row.pop(0)] = ends[rank] = start + duration[kind]
    return max(done.values())


@given(
    st.lists(st.integers(0, 10**6), min_size=4, max_size=4),
    st.lists(st.integers(0, 10**9), min_size=10, max_size=10),
)
def test_nodes_add_up_exactly_to_what_stages_took(costs: list[int], measured: list[int]) -> None:
    graph = chain(costs)
    plan = planned(graph)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.REDUCE)
    times = [
        dict(zip(kinds, measured[:5], strict=True)),
        dict(zip(kinds, measured[5:], strict=True)),
    ]
    after = scaled(graph, plan.stages, times)
    for stage, wanted in zip(plan.stages, times, strict=True):
        nodes = [after.by_name[name] for name in stage.nodes]
        assert sum(node.forward_ns for node in nodes) == wanted[Kind.FORWARD]
        assert sum(node.backward_ns for node in nodes) == wanted[Kind.BACKWARD]
        assert sum(node.backward_input_ns or 0 for node in nodes) == wanted[Kind.BACKWARD_INPUT]
        assert sum(node.backward_weight_ns or 0 for node in nodes) == wanted[Kind.BACKWARD_WEIGHT]
        assert sum(node.per_step_ns for node in nodes) == wanted[Kind.REDUCE]


def with_parameters(names: Sequence[Sequence[str]]) -> CostGraph:
    """A chain whose nodes have these parameters."""
    graph = chain([10] * len(names))
    nodes = tuple(
        replace(node, parameters=tuple(each)) for node, each in zip(graph.nodes, names, strict=True)
    )
    known = sorted({name for each in names for name in each})
    return replace(
        graph,
        nodes=nodes,
        parameters=tuple(Parameter(name=n, bytes=4, trainable=True) for n in known),
    )


@pytest.mark.parametrize(
    "names",
    [[["embedding"], ["a"], ["b"], ["embedding"]], [["a"], ["b"], [], []], [[], [], ["a"], []]],
    ids=["a parameter on both stages", "none on the last", "none on the first"],
)
def test_a_plan_has_what_ends_the_step_of_each_stage_exactly(names: list[list[str]]) -> None:
    found: list[Times] = [
        {Kind.FORWARD: 20, Kind.BACKWARD: 40, Kind.REDUCE: 7},
        {Kind.FORWARD: 20, Kind.BACKWARD: 40, Kind.REDUCE: 1000},
    ]
    plan = correct_stages(with_parameters(names), planned, lambda plan: found)
    assert [stage.per_step_ns for stage in plan.stages] == [7, 1000]


def test_what_ends_the_step_is_replaced_by_what_a_later_round_measures() -> None:
    graph = chain([10] * 8)
    for cut in (4, 2, 6):
        assignment = {node.name: int(index >= cut) for index, node in enumerate(graph.nodes)}
        stages = planned(graph, assignment=assignment).stages
        before = sum(node.per_step_ns for node in graph.nodes)
        assert sum(stage.per_step_ns for stage in stages) == before, (
            "another cut loses none and counts none twice"
        )
        graph = scaled(graph, stages, [{Kind.FORWARD: 1, Kind.BACKWARD: 1, Kind.REDUCE: cut}] * 2)
        assert [stage.per_step_ns for stage in planned(graph, assignment=assignment).stages] == [
            cut,
            cut,
        ]


def test_a_recompute_and_its_forward_share_one_time() -> None:
    graph = chain([10, 10])
    times: Times = {Kind.FORWARD: 30, Kind.RECOMPUTE: 50, Kind.BACKWARD: 20}
    after = scaled(graph, planned(graph).stages, [times, times])
    assert [node.forward_ns for node in after.nodes] == [40, 40]


def test_halves_that_were_not_measured_scale_with_the_whole() -> None:
    graph = chain([10, 10])
    after = scaled(graph, planned(graph).stages, [{Kind.FORWARD: 10, Kind.BACKWARD: 30}] * 2)
    assert [node.backward_input_ns for node in after.nodes] == [15, 15]


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1))
def test_parts_are_in_proportion_and_their_sum_exact(total: int, weights: list[int]) -> None:
    parts = apportioned(total, weights)
    whole = sum(weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        share = total * weight / whole if whole else total / len(weights)
        assert abs(part - share) <= 1 + 1e-9 * total
