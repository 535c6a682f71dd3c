"""Costs that are given come back, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import fields
from dataclasses import replace as replace_field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.api.costs import comparable, cost_graph, cost_model
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.staleness import staleness
from pipecompile.cost_models.protocol import CallCost, NodeCall
from pipecompile.errors import FormatError, InputError, StaleProfileError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.serialization import encode


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(1, 2, 3),
        nn.BatchNorm1d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(12, 4),
    )


def network(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4)
    )


def target_of(model: nn.Module, **more: Any) -> Target:
    return Target(model, arguments_of(model, torch.ones(4, 8)), mean, torch.zeros(4, 4), **more)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def costed(target: Target, costs: str) -> CostGraph:
    options = options_for(target, k=2, costs=costs)
    return cost_graph(
        target, costs, options.microbatches, capture_target(target, options, verify=False)
    )


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("costs", ["flops", "roofline:h100", "roofline:cpu"])
def test_a_table_gives_the_times_that_were_written(costs: str, tmp_path: Path) -> None:
    target = Target(
        (model := convolutional()),
        arguments_of(model, torch.ones(4, 1, 8)),
        mean,
        torch.zeros(4, 4),
    )
    before = costed(target, costs)
    file = tmp_path / "costs.json"
    file.write_bytes(encode(before))
    assert costed(target, f"table:{file}") == before


@pytest.mark.sweep
def test_a_table_of_a_device_that_does_not_fuse_attention_keeps_the_scores(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    target = Target(model, arguments_of(model, torch.ones(4, 4, 8)), mean, torch.zeros(4, 4, 8))
    before = costed(target, "roofline:tpu-v2")
    file = tmp_path / "costs.json"
    file.write_bytes(encode(before))
    assert costed(target, f"table:{file}") == before


def test_what_a_step_takes_once_passes_through(tmp_path: Path) -> None:
    before = costed(target_of(network()), "flops")
    corrected = replace(
        before,
        nodes=tuple(replace(n, per_step_ns=place + 1) for place, n in enumerate(before.nodes)),
    )
    file = tmp_path / "costs.json"
    file.write_bytes(encode(corrected))
    assert costed(target_of(network()), f"table:{file}") == corrected


def test_no_workspace_is_what_our_own_file_says_and_what_another_left_out(tmp_path: Path) -> None:
    target = Target(
        (model := convolutional()),
        arguments_of(model, torch.ones(4, 1, 8)),
        mean,
        torch.zeros(4, 4),
    )
    before = costed(target, "flops")
    workspace = [node.workspace_bytes for node in before.nodes]
    assert any(workspace)
    file = tmp_path / "costs.json"
    none = replace(before, nodes=tuple(replace(node, workspace_bytes=0) for node in before.nodes))
    for fingerprint, expected in [(before.fingerprint, [0] * len(workspace)), ("", workspace)]:
        file.write_bytes(encode(replace(none, fingerprint=fingerprint)))
        assert [node.workspace_bytes for node in costed(target, f"table:{file}").nodes] == expected


def times(graph: CostGraph) -> dict[str, tuple[int | None, ...]]:
    return {
        node.name: (
            node.forward_ns,
            node.backward_ns,
            node.backward_input_ns,
            node.backward_weight_ns,
        )
        for node in graph.nodes
    }


def test_a_backward_that_is_not_split_counts_half_each(tmp_path: Path) -> None:
    before = costed(target_of(network()), "flops")
    nodes = tuple(
        replace(n, backward_ns=7, backward_input_ns=None, backward_weight_ns=None)
        for n in before.nodes
    )
    file = tmp_path / "costs.json"
    file.write_bytes(encode(replace(before, nodes=nodes)))
    assert times(costed(target_of(network()), f"table:{file}"))["_0"][1:] == (7, 4, 4)


def test_a_table_of_another_model_is_stale(tmp_path: Path) -> None:
    before = costed(target_of(network()), "flops")
    file = tmp_path / "costs.json"
    file.write_bytes(encode(before))
    with pytest.raises(
        StaleProfileError,
        match=rf"costs\.json was made for another graph \({before.fingerprint[:12]}",
    ):
        costed(target_of(network(width=32)), f"table:{file}")


def test_a_table_from_elsewhere_must_name_the_same_nodes(tmp_path: Path) -> None:
    before = costed(target_of(network()), "flops")
    file = tmp_path / "costs.json"
    fewer = replace(before, fingerprint="", nodes=before.nodes[:-1], tensors=(), gradients=())
    file.write_bytes(encode(fewer))
    with pytest.raises(StaleProfileError, match="only the model has 'output'"):
        costed(target_of(network()), f"table:{file}")


def costs_by_name(function: Any) -> dict[str, tuple[int | None, ...]]:
    return times(costed(target_of(network(), costs=function), "function"))


def test_a_forward_alone_stands_for_the_backward() -> None:
    costs = costs_by_name(lambda node, call: 100 if call.operator == "torch.nn.Linear" else 3)
    assert set(costs.values()) == {(0, 0, 0, 0), (100, 200, 100, 100), (3, 6, 3, 3)}


def test_a_function_may_give_all_times() -> None:
    costs = costs_by_name(lambda node, call: CallCost(1, 5, 3, 4))
    assert set(costs.values()) == {(0, 0, 0, 0), (1, 5, 3, 4)}


@pytest.mark.parametrize("given", [-1, 1.5, None, True])
def test_what_is_no_time_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="whole nanoseconds"):
        costs_by_name(lambda node, call: given)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("field", [field.name for field in fields(CallCost)])
@pytest.mark.parametrize("given", [-1, 1.5, True])
def test_every_figure_of_a_cost_is_held_to_the_same(field: str, given: Any) -> None:
    with pytest.raises(InputError, match="a CallCost of whole nanoseconds and bytes"):
        costs_by_name(lambda node, call: replace_field(CallCost(1, 5, 3, 4, 8), **{field: given}))


def weighed(node: fx.Node, call: NodeCall) -> int:
    return 1000 if node.name == "_0" else 1


def test_a_plan_cuts_by_the_function() -> None:
    pipeline = pipecompile(
        network(), torch.ones(4, 8), k=2, costs=weighed, loss_fn=mean, microbatches=2
    )
    assert pipeline.plan.options.costs == "function"
    assert [name for name in pipeline.plan.stages[0].nodes if name.startswith("_")] == ["_0"]


@pytest.mark.parametrize("costs", ["function", "rooflin:h100", "roofline", "table:", "flops:x"])
def test_unknown_costs_list_the_known_ones(costs: str) -> None:
    with pytest.raises(InputError, match="roofline:DEVICE, table:FILE"):
        cost_model(costs)


def test_a_changed_table_makes_a_plan_stale(tmp_path: Path) -> None:
    target, file = target_of(network()), tmp_path / "costs.json"
    graph = costed(target, "flops")
    file.write_bytes(encode(graph))
    options = options_for(target, k=2, costs=f"table:{file}")
    plan = make_plan(target, options, capture_target(target, options, verify=True))
    assert all(finding.passed for finding in staleness(plan, target))
    slower = replace(
        graph, nodes=tuple(replace(node, forward_ns=node.forward_ns + 1) for node in graph.nodes)
    )
    file.write_bytes(encode(slower))
    stale, *drifts = staleness(plan, target)
    assert "the costs changed" in stale.message
    assert {(drift.code, drift.passed, drift.limit) for drift in drifts} == {("drift", False, 0)}
    file.write_bytes(encode(replace(graph, fingerprint="0" * 64)))
    (stale,) = staleness(plan, target)
    assert "another graph" in stale.message
    file.unlink()
    assert [finding.passed for finding in staleness(plan, target)] == [True]


def test_what_can_be_compared(tmp_path: Path) -> None:
    known = {
        "flops": True,
        "roofline:h100": True,
        "roofline:none.json": False,
        "table:none.json": False,
        "measured": False,
        "function": False,
    }
    assert {costs: comparable(costs) for costs in known} == known
    damaged = tmp_path / "costs.json"
    damaged.write_text("{")
    with pytest.raises(FormatError):
        comparable(f"table:{damaged}")
