"""Plans over devices of several kinds: from costs to stages, caps and the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipecompile.api.choices import requested_options
from pipecompile.api.costs import cost_graph
from pipecompile.api.plan import make_plan
from pipecompile.api.staleness import check_current
from pipecompile.cost_models.device import devices_of
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.ir.unequal_costs import UnequalCosts
from pipecompile.planner.draft import draft
from tests.chains_of_nodes import chain

LINKS = Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=2))


def _planned(
    costs: CostGraph,
    objective: str,
    cut: dict[str, int] | None = None,
    ranks: int = 2,
    schedule: str = "1f1b",
) -> Plan:
    options = Options(
        k=ranks,
        microbatches=ranks + 1,
        schedule=schedule,
        objective=objective,
        recompute="none",
        memory_bytes=None,
        costs="function",
    )
    return draft(
        costs,
        options,
        graph_digest="0" * 64,
        capture=Provenance(verified=True),
        microbatch_shapes=[(1,)],
        links=LINKS,
        assignment=cut,
    )


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_plan_is_the_best_of_all_cuts_or_within_its_gap(data: st.DataObject) -> None:
    count, ranks = data.draw(st.integers(3, 6)), data.draw(st.integers(2, 3))
    time = st.tuples(st.integers(1, 50), st.integers(1, 50))
    times = st.lists(time, min_size=count, max_size=count)
    sizes = [data.draw(st.integers(0, 20)) for _ in range(count)]
    kinds = [chain(data.draw(times), sizes) for _ in range(2)]
    costs = UnequalCosts.of(kinds, [0, 1, 0][:ranks])
    found = _planned(costs, "step-time", ranks=ranks)
    steps = []
    for inner in combinations(range(1, count), ranks - 1):
        ends = (0, *inner, count)
        cut = {
            f"n{index}": stage
            for stage, (start, stop) in enumerate(pairwise(ends))
            for index in range(start, stop)
        }
        plan = _planned(costs, "step-time", cut, ranks)
        for stage, (start, stop) in enumerate(pairwise(ends)):
            own = costs.on_rank(stage).nodes[start:stop]
            assert plan.stages[stage].forward_ns == sum(node.forward_ns for node in own)
            assert plan.stages[stage].backward_ns == sum(node.backward_ns for node in own)
        steps.append(plan.prediction.step_ns)
    assert found.search.bound <= min(steps) <= found.prediction.step_ns
    gap = (found.prediction.step_ns - found.search.bound) / found.prediction.step_ns
    assert found.search.gap == pytest.approx(gap)


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, dict[str, Any]]:
    """A plan over two kinds of devices, and the cost graph of each kind."""
    with torch.device("meta"):
        layers = [nn.Linear(2048, 2048) for _ in range(12)]
        target = Target.of((nn.Sequential(*layers), torch.empty(4 * 256, 2048)), "wide")
    options = requested_options(
        k=3, microbatches=4, costs="roofline:h100,2xl4", memory=["80GB", "24GB", "24GB"]
    )
    captured = capture_target(target, options, verify=False)
    plan = make_plan(target, options, captured)
    graphs = {kind: cost_graph(target, f"roofline:{kind}", 4, captured) for kind in ("h100", "l4")}
    check_current(plan, captured)
    return plan, graphs


def test_stages_take_what_their_device_takes(planned: tuple[Plan, dict[str, Any]]) -> None:
    plan, graphs = planned
    for stage, kind in zip(plan.stages, ("h100", "l4", "l4"), strict=True):
        nodes = [graphs[kind].by_name[name] for name in stage.nodes]
        assert stage.forward_ns == sum(node.forward_ns for node in nodes)
        assert stage.backward_ns == sum(node.backward_ns for node in nodes)
    assert plan.options.caps(3) == (80 * 10**9, 24 * 10**9, 24 * 10**9)
    assert plan.search.bound <= plan.search.value
    # A tenth of the bandwidth: the fast device has most of the model.
    assert len(plan.stages[0].nodes) > len(plan.stages[1].nodes)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h100", ("h100",)),
        ("2xh100,a100", ("h100", "h100", "a100")),
        ("1xrtx4090, 2xl4", ("rtx4090", "l4", "l4")),
    ],
)
def test_devices_are_listed_by_rank(text: str, names: Sequence[str]) -> None:
    assert devices_of(text) == names


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"k": 4, "costs": "roofline:h100,2xa100"}, "lists 3 devices, but there are 4 ranks"),
        (
            {"k": 4, "schedule": "zb-v", "costs": "roofline:h100,a100"},
            "several kinds, whose ranks have one stage each, but k=4 on 2 ranks",
        ),
        ({"k": 2, "costs": "roofline:h100,h10"}, "'h10' is neither a device nor a device file"),
    ],
)
def test_lists_of_devices_that_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        requested_options(**choices)


def test_equal_devices_may_be_listed_on_ranks_of_several_stages() -> None:
    options = requested_options(k=4, schedule="zb-v", costs="roofline:2xh100")
    assert options.costs == "roofline:2xh100"


def test_the_latency_is_that_of_each_stage_on_its_device() -> None:
    fast, slow = chain([(3, 0)] * 6, [5] * 6), chain([(6, 0)] * 6, [5] * 6)
    costs = UnequalCosts.of([fast, slow], [0, 1])
    plan = _planned(costs, "latency", schedule="forward-only")
    assert plan.search.bound <= plan.search.value == plan.search.values["latency_ns"]
    # All but one node on the fast device, and a value of 5 bytes in between.
    assert plan.search.value == 5 * 3 + 6 + (5 + 2)


def test_memory_for_inference_is_that_of_each_device() -> None:
    options = requested_options(k=2, costs="roofline:h100,l4", objective="throughput")
    assert options.memory_bytes == (80 * 10**9, 24 * 10**9)


def test_a_list_of_one_kind_plans_as_that_kind() -> None:
    one = chain([(3, 4)] * 5, [7] * 5)
    unequal = _planned(UnequalCosts.of([one], [0, 0]), "variance")
    alike = _planned(one, "variance")
    assert alike.stages == unequal.stages
    assert alike.prediction == unequal.prediction
