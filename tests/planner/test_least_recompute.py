"""What a policy recomputes for certain is never more than what the stages of a cut recompute."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.plan import Options, Recompute
from pipecompile.planner.least_recompute import Reachability
from pipecompile.planner.recompute import recompute_planner
from pipecompile.recompute.stages import stages_of
from tests.ir.cost_graphs import cost_graphs
from tests.sweeps import examples

STAGES = 3


@st.composite
def cut_graphs(draw: st.DrawFn) -> tuple[CostGraph, dict[str, int]]:
    """A graph of blocks in which every node takes time, and a cut of it into three stages."""
    graph = draw(cost_graphs(8, least=5))
    size = draw(st.integers(1, 4))
    nodes = tuple(
        replace(
            node,
            module=f"blocks.{place // size}",
            forward_ns=draw(st.integers(1, 9)),
            saves_at=draw(st.sampled_from(["before", "after"])) if node.saved else "never",
        )
        for place, node in enumerate(graph.nodes)
    )
    stage_of: dict[str, int] = {}
    for node in nodes:
        # Any monotone cut, and not only runs of the graph's order.
        read = (tensor.producer for tensor in graph.tensors if node.name in tensor.consumers)
        least = max((stage_of[name] for name in read), default=0)
        stage_of[node.name] = draw(st.integers(least, STAGES - 1))
    return replace(graph, nodes=nodes), stage_of


def planned_with(policy: Recompute) -> Options:
    return Options(
        k=STAGES,
        microbatches=4,
        schedule="1f1b",
        objective="variance",
        recompute=policy,
        memory_bytes=None,
        costs="table",
    )


@settings(max_examples=examples(150), deadline=None)
@given(cut_graphs(), st.sampled_from(["block", "sqrt"]))
def test_guarded_nodes_are_recomputed_in_every_cut(
    case: tuple[CostGraph, dict[str, int]], policy: Recompute
) -> None:
    graph, stage_of = case
    assume(set(stage_of.values()) == set(range(STAGES)))
    planner = recompute_planner(graph, planned_with(policy), tuple(range(STAGES)))
    recomputed = sum(stage.recompute_ns for stage in stages_of(graph, stage_of, planner))
    guarded = Reachability(graph).guarded
    certain = sum(
        ns
        for node, ns in zip(graph.nodes, guarded.ns, strict=True)
        if stage_of[node.name] < STAGES - 1
    )
    assert certain - guarded.spared_ns * (STAGES - 1) <= recomputed


def test_a_chain_of_blocks_is_guarded_up_to_its_last_savers() -> None:
    graph = chain_of_blocks()
    guarded = Reachability(graph).guarded
    # Of each block the last saver gets its input before its kernels run, which need not run again.
    assert guarded.ns == (5, 3, 0, 5, 3, 0)
    assert guarded.spared_ns == 5 + 3  # the saver, and what saves nothing


def chain_of_blocks() -> CostGraph:
    """Two blocks of three nodes: one that saves its input, one that saves nothing, and a saver."""
    times, savers = (5, 3, 7) * 2, (True, False, True) * 2
    return CostGraph(
        nodes=tuple(
            Node(
                name=f"n{place}",
                operator="f",
                module=f"blocks.{place // 3}",
                group=None,
                forward_ns=ns,
                backward_ns=0,
                parameter_bytes=0,
                saved_bytes=8 * saves,
                saved=(0,) if saves else (),
                saves_at="before" if saves else "never",
            )
            for place, (ns, saves) in enumerate(zip(times, savers, strict=True))
        ),
        tensors=tuple(
            Tensor(producer=f"n{place}", consumers=(f"n{place + 1}",), bytes=8, gradient_bytes=8)
            for place in range(5)
        ),
        storages=(8,),
    )
