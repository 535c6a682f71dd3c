"""Small plans made without a model, the way the pipeline makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.memory import Layout, rank_memory
from pipecompile.ir.plan import Boundary, Fingerprint, Link, Options, OwnedParameter, Plan, Prediction, Route, Stage
from pipecompile.partition.linear import solve
from pipecompile.partition.problem import Problem
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import generate
from pipecompile.schedule.simulate import gradient_flows, simulate_stages

MakePlan = Callable[..., Plan]


def _graph(blocks: int) -> CostGraph:
    """A chain of unequal blocks, a skip from the first to the last, and one parameter at both ends."""
    nodes = tuple(
        Node(
            name=f"block.{i}",
            forward_ns=1_000_000 + 90_000 * (i * 7 % 5),
            backward_ns=2_000_000 + 150_000 * (i * 5 % 7),
            parameter_bytes=4 << 20,
            saved_bytes=1 << 20,
            group=None,
            workspace_bytes=1 << 16,
            saved=(i,),
            parameters=(f"block.{0 if i == blocks - 1 else i}.weight",),
            module=f"model.block.{i}",
        )
        for i in range(blocks)
    )
    tensors = tuple(
        Tensor(
            producer=f"block.{i}",
            consumers=(f"block.{i + 1}", f"block.{blocks - 1}") if i == 0 else (f"block.{i + 1}",),
            bytes=1 << 20,
            gradient_bytes=1 << 20,
            storage=i,
        )
        for i in range(blocks - 1)
    )
    parameters = tuple(
        Parameter(
            name=f"block.{i}.weight",
            bytes=4 << 20,
            trainable=True,
            aliases=(f"block.{blocks - 1}.weight",) if i == 0 else (),
        )
        for i in range(blocks - 1)
    )
    return CostGraph(nodes=nodes, tensors=tensors, storages=(1 << 20,) * blocks, parameters=parameters)


def _stages(graph: CostGraph, layout: Layout, ends: Sequence[int], recompute: bool) -> tuple[Stage, ...]:
    bounds = [0, *ends, len(layout.units)]
    edges = [
        tuple(
            Boundary(name=layout.units[first][0], bytes=value, gradient_bytes=gradient)
            for first, last, value, gradient in layout.spans
            if first < cut <= last
        )
        for cut in bounds
    ]
    stages = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        nodes = [graph.by_name[name] for unit in layout.units[start:stop] for name in unit]
        forward, again = sum(node.forward_ns for node in nodes), recompute and index < len(ends)
        stages.append(
            Stage(
                nodes=tuple(node.name for node in nodes),
                modules=tuple(node.module for node in nodes),
                groups=(),
                parameters=tuple(name for node in nodes for name in node.parameters),
                forward_ns=forward,
                backward_ns=sum(node.backward_ns for node in nodes),
                backward_input_ns=None,
                backward_weight_ns=None,
                recompute_ns=forward if again else 0,
                inputs=edges[index],
                outputs=edges[index + 1],
                recompute="stage" if again else "none",
                footprint=layout.footprint(start, stop),
            )
        )
    return tuple(stages)


def _make_plan(
    k: int = 4, microbatches: int = 4, schedule: str = "1f1b", recompute: bool = False, bandwidth: int | None = 10**10
) -> Plan:
    graph, link = _graph(3 * k + 2), Link(bandwidth_bytes_per_s=bandwidth, latency_ns=10_000)
    problem = Problem(graph=graph, k=k, link=link, recompute=recompute)
    found = solve(problem)
    stages = _stages(graph, Layout(graph, problem.units), found.cuts, recompute)
    compute = generate(schedule, range(k), microbatches, recompute)
    lowered = lower(compute, simulate_stages(compute, stages, link), gradient_flows(stages))
    timeline = simulate_stages(lowered, stages, link)
    memory = tuple(
        rank_memory({rank: stages[rank].footprint}, row, microbatches=microbatches)
        for rank, row in enumerate(lowered.rows)
    )
    last = f"block.{len(graph.nodes) - 1}.weight"
    owners = {
        name: [index for index, stage in enumerate(stages) if name in stage.parameters]
        for name in graph.parameter_by_name
    }
    return Plan(
        fingerprint=Fingerprint(graph="0" * 64, costs="1" * 64),
        options=Options(
            k=k,
            microbatches=microbatches,
            schedule=schedule,
            objective="variance",
            recompute="stage" if recompute else "none",
            memory_bytes=1 << 30,
            costs="flops",
        ),
        verified=True,
        k=k,
        ranks=k,
        stages_per_rank=1,
        replicas=1,
        microbatches=microbatches,
        microbatch_shapes=((2, 128),),
        link=link,
        stages=stages,
        routes=(Route(name="block.0", stages=tuple(range(k))),),
        parameters=tuple(
            OwnedParameter(
                name=name,
                aliases=(last,) if len(places) > 1 else (),
                bytes=4 << 20,
                trainable=True,
                owner=places[0],
                stages=tuple(places),
            )
            for name, places in owners.items()
        ),
        schedule=lowered,
        prediction=Prediction(
            step_ns=timeline.makespan_ns,
            span_ns=timeline.span_ns,
            bubble=timeline.bubble,
            loads_ns=found.loads_ns,
            idle=timeline.idle,
            memory=memory,
        ),
        search=found.search,
    )


@pytest.fixture
def make_plan() -> MakePlan:
    """Makes a plan of `k` stages for a small made-up graph."""
    return _make_plan
