"""A search is never worse than a named order, and `auto` never worse than a policy, whatever must
be chosen beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.api.soundness import findings
from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.plan import Options, Plan, Provenance, Recompute
from pipecompile.planner.draft import draft
from pipecompile.planner.open_choices import named_orders, named_policies
from pipecompile.planner.placement_draft import PlacementDrafter
from pipecompile.planner.step_bound import StepBounds
from pipecompile.schedule import selection
from pipecompile.schedule.selection import placements
from tests.cuts import node as node_of
from tests.ir.cost_graphs import cost_graphs
from tests.sweeps import examples

POLICIES: tuple[Recompute, ...] = ("none", "stage", "except-last", "block", "sqrt")


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promises hold for any budget, and least by themselves for a small one."""
    monkeypatch.setattr(selection, "SEARCH_SECONDS", 0.02)


def planned(graph: CostGraph, options: Options) -> Plan | None:
    """The plan, None if there is none."""
    try:
        return draft(
            graph,
            options,
            graph_digest="",
            capture=Provenance(verified=False),
            microbatch_shapes=[(1,)],
        )
    except InfeasibleError:
        return None


@st.composite
def problems(draw: st.DrawFn) -> tuple[CostGraph, Options]:
    """A graph in blocks whose backwards can be split, and a cap of each rank that is about what
    training takes.
    """
    graph = draw(cost_graphs(8, least=5))
    size = draw(st.integers(1, 3))
    nodes = []
    for place, node in enumerate(graph.nodes):
        times = [draw(st.integers(0, 9)) for _ in range(2)]
        nodes.append(
            replace(
                node,
                module=f"blocks.{place // size}",
                forward_ns=1000 * node.forward_ns,
                backward_ns=1000 * sum(times),
                backward_input_ns=1000 * times[0],
                backward_weight_ns=1000 * times[1],
            )
        )
    graph = replace(graph, nodes=tuple(nodes))
    stages_per_rank = draw(st.sampled_from([1, 1, 2]))
    options = Options(
        k=2 * stages_per_rank,
        stages_per_rank=stages_per_rank,
        microbatches=draw(st.sampled_from([1, 2, 4])),
        schedule="gpipe",
        objective="variance",
        recompute="none",
        memory_bytes=None,
        costs="table",
    )
    free = planned(graph, options)
    assume(free is not None)
    assert free is not None
    parts = [draw(st.integers(50, 105)) for _ in range(2)]
    caps = tuple(
        max(1, rank.total.bound * part // 100)
        for rank, part in zip(free.prediction.memory, parts, strict=True)
    )
    return graph, replace(options, memory_bytes=caps)


def narrowed(graph: CostGraph, options: Options) -> Iterator[Options]:
    for placement in placements(options):
        yield from named_orders(graph, options, placement)
    yield from named_policies(options)


def check_never_worse(graph: CostGraph, options: Options) -> None:
    chosen = planned(graph, options)
    if chosen is not None:
        assert findings(chosen) == []
        assert chosen.options == options
    for other in narrowed(graph, options):
        plan = planned(graph, other)
        if plan is not None:
            assert chosen is not None, f"nothing is found where {other} fits"
            assert chosen.prediction.step_ns <= plan.prediction.step_ns, other


few = settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(problems(), st.sampled_from(POLICIES))
def test_a_search_is_never_worse_than_a_named_order(
    problem: tuple[CostGraph, Options], policy: Recompute
) -> None:
    graph, options = problem
    check_never_worse(graph, replace(options, schedule="search", recompute=policy))


@few
@given(problems(), st.sampled_from(["block", "sqrt"]))
def test_a_search_over_a_v_may_recompute_regions(
    problem: tuple[CostGraph, Options], policy: Recompute
) -> None:
    """Their backwards are whole, and the order by which cuts in a V are judged splits them."""
    graph, options = problem
    where = replace(options, k=4, stages_per_rank=2, placement="v", memory_bytes=None)
    plan = planned(graph, replace(where, schedule="search", recompute=policy))
    gpipe = planned(graph, replace(where, schedule="gpipe", recompute=policy))
    assert plan is not None
    assert gpipe is not None
    assert plan.prediction.step_ns <= gpipe.prediction.step_ns


@few
@given(problems(), st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"]))
def test_auto_is_never_worse_than_a_policy(
    problem: tuple[CostGraph, Options], schedule: str
) -> None:
    graph, options = problem
    needed = 2 if schedule in ("zb-v", "interleaved-1f1b") else 1
    if schedule != "gpipe":
        assume(options.stages_per_rank == needed)
    check_never_worse(graph, replace(options, schedule=schedule, recompute="auto"))


@few
@given(problems())
def test_both_together_are_never_worse(problem: tuple[CostGraph, Options]) -> None:
    graph, options = problem
    check_never_worse(graph, replace(options, schedule="search", recompute="auto"))


@few
@given(problems(), st.sampled_from(POLICIES), st.sampled_from(["search", "1f1b", "gpipe"]))
def test_what_is_ruled_out_is_no_shorter(
    problem: tuple[CostGraph, Options], policy: Recompute, schedule: str
) -> None:
    """Whatever its caps: the bound looks at times alone."""
    graph, options = problem
    options = replace(options, schedule=schedule, recompute=policy, memory_bytes=None)
    plan = planned(graph, options)
    assume(plan is not None)
    assert plan is not None
    bounds = StepBounds(graph, plan.schedule.placement)
    assert not bounds.rule_out(options, plan.prediction.step_ns + 1)


def test_auto_is_never_worse_than_a_policy_that_fits_without_copies_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stage holds its copies, which may take the last bytes of a policy alone."""
    planned_with, with_stages = PlacementDrafter.planned, PlacementDrafter.with_stages

    def tight_stages(drafter: PlacementDrafter, plan: Plan, options: Options) -> Plan:
        if drafter.graph.copied:
            raise InfeasibleError("no room")
        return with_stages(drafter, plan, options)

    def tight(drafter: PlacementDrafter, options: Options, *, explained: bool) -> Plan:
        if drafter.graph.copied and options.recompute != "stage":
            raise InfeasibleError("no room")
        return planned_with(drafter, options, explained=explained)

    layers = [node_of(f"layer{index}", 600, 1200, saved=8) for index in range(4)]
    names = [layer.name for layer in layers]
    cos = replace(node_of("cos", 2), is_copyable=True)
    read = Tensor(producer="cos", consumers=tuple(names), bytes=4, gradient_bytes=0)
    sent = (
        Tensor(producer=a, consumers=(b,), bytes=1, gradient_bytes=1) for a, b in pairwise(names)
    )
    graph = CostGraph(nodes=(cos, *layers), tensors=(read, *sent))
    options = Options(
        k=2,
        microbatches=4,
        schedule="1f1b",
        objective="max-load",
        recompute="auto",
        costs="flops",
        memory_bytes=1 << 30,
    )
    alone = planned(graph, replace(options, recompute="none"))
    monkeypatch.setattr(PlacementDrafter, "planned", tight)
    monkeypatch.setattr(PlacementDrafter, "with_stages", tight_stages)
    best = planned(graph, options)
    assert alone is not None and best is not None
    assert best.prediction.step_ns <= alone.prediction.step_ns
    assert best.options == options
