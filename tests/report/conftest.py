"""Small plans made without a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor, TimeUnit
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Options, Plan, Provenance, Recompute, ShardLevel
from pipecompile.planner.draft import draft

MakePlan = Callable[..., Plan]


def _graph(blocks: int, time_unit: TimeUnit) -> CostGraph:
    """A chain of unequal blocks, a skip over all of them, and one parameter at both ends."""
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
            kv_token_bytes=4096 * (i % 2),
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
    return CostGraph(
        time_unit=time_unit,
        nodes=nodes,
        tensors=tensors,
        storages=(1 << 20,) * blocks,
        parameters=parameters,
    )


def _make_plan(
    k: int = 4,
    microbatches: int = 4,
    schedule: str = "1f1b",
    recompute: Recompute = "none",
    bandwidth: int | None = 10**10,
    memory_bytes: int | tuple[int, ...] | None = 1 << 30,
    costs: str = "roofline:h100",
    stages_per_rank: int | None = None,
    objective: str = "variance",
    replicas: int = 1,
    shard: ShardLevel | None = None,
) -> Plan:
    options = Options(
        k=k,
        microbatches=microbatches,
        schedule=schedule,
        objective=objective,
        recompute=recompute,
        memory_bytes=memory_bytes,
        costs=costs,
        stages_per_rank=stages_per_rank,
        replicas=replicas,
        shard=shard,
    )
    links = Links.of(Link(bandwidth_bytes_per_s=bandwidth, latency_ns=10_000))
    return draft(
        _graph(3 * k + 2, "relative" if costs == "flops" else "ns"),
        options,
        graph_digest="0" * 64,
        capture=Provenance(verified=True),
        microbatch_shapes=[(2, 128)],
        links=links,
    )


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    """Makes a plan of `k` stages for a small made-up graph."""
    return _make_plan
