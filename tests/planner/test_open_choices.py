"""A search is never worse than a named order, and `auto` never worse than a policy, whatever must
be chosen beside them.
"""

from __future__ import annotations

from collections.abc import Iterator

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
def problems(draw: st.DrawFn, *, copies: bool = False) -> tuple[CostGraph, Options]:
    """A graph in blocks whose backwards can be split, and a cap of each rank that is about what
    training takes; with `copies` several nodes read and save what a cheap one makes.
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
    if copies:
        graph = with_cheap_node(graph, draw(st.sampled_from([64, 513, 3000])))
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


def with_cheap_node(graph: CostGraph, size: int) -> CostGraph:
    """The graph with a first node whose value all others read and save."""
    names, storage = tuple(node.name for node in graph.nodes), len(graph.storages)
    cheap = replace(
        node_of("cos", 2),
        backward_input_ns=0,
        backward_weight_ns=0,
        forward_peak_bytes=size,
        is_copyable=True,
    )
    read = Tensor(producer="cos", consumers=names, bytes=size, gradient_bytes=0, storage=storage)
    savers = (
        replace(
            node,
            saved=(*node.saved, storage),
            uses=(*node.uses, ("other",)),
            saves_at="before" if node.saves_at == "never" else node.saves_at,
        )
        for node in graph.nodes
    )
    return replace(
        graph,
        nodes=(cheap, *savers),
        tensors=(read, *graph.tensors),
        storages=(*graph.storages, size),
        contents=(*graph.contents, None),
    )


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


@few
@given(problems(copies=True), st.sampled_from([*POLICIES, "auto"]))
def test_it_is_never_worse_where_something_fits_without_copies_only(
    problem: tuple[CostGraph, Options], policy: Recompute
) -> None:
    """Each stage holds its copies, which may take the last bytes under one order or policy."""
    graph, options = problem
    check_never_worse(graph, replace(options, schedule="search", recompute=policy))
