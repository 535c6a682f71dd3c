"""Plans of made-up Transformers whose cut is given, so that many ranks take no search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor, TimeUnit
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Fingerprint, Options, Plan, Provenance, Search
from pipecompile.planner.draft import costs_digest
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.scheduled_stages import scheduled
from pipecompile.recompute.stages import owners_of
from pipecompile.schedule.selection import placements

__all__ = ["transformer_plan"]

TIMES = {"attn": 3_100_000, "mlp": 4_700_000}
ENDS = {"model.embed": 400_000, "model.norm": 150_000, "lm_head": 5_200_000}
LINKS = Links.of(Link(bandwidth_bytes_per_s=25 * 10**9, latency_ns=10_000))
ACTIVATION, WEIGHT = 8 << 20, 24 << 20


def transformer_plan(
    k: int,
    microbatches: int,
    layers: int,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    memory_bytes: int | None = None,
    moved: int = 0,
    time_unit: TimeUnit = "ns",
) -> Plan:
    """A plan of `k` stages of about equal time; the first `moved` cuts lie a node later."""
    graph = _graph(layers, time_unit)
    options = Options(
        k=k,
        microbatches=microbatches,
        schedule=schedule,
        objective="variance",
        recompute="none",
        memory_bytes=memory_bytes,
        costs="flops" if time_unit == "relative" else "roofline:h100",
        stages_per_rank=stages_per_rank,
    )
    (placement,) = placements(options)
    cut = _even_cut(graph, k, moved)
    # No cap while it is planned: a cut that is given may be above it, and a page shows that.
    planner = recompute_planner(graph, replace(options, memory_bytes=None), placement)
    result = scheduled(planner, LINKS, cut)
    search = Search(
        objective="variance", method="given", value=1, bound=0, gap=1.0, proven=False, values={}
    )
    return Plan(
        fingerprint=Fingerprint(graph="0" * 64, costs=costs_digest(graph)),
        options=options,
        capture=Provenance(verified=True, model="Transformer"),
        k=k,
        ranks=result.schedule.ranks,
        stages_per_rank=k // result.schedule.ranks,
        replicas=1,
        microbatches=microbatches,
        microbatch_shapes=((1, 2048),),
        links=LINKS,
        allocator=graph.allocator,
        time_unit=time_unit,
        stages=result.stages,
        routes=(),
        parameters=tuple(owners_of(graph, result.stages)),
        schedule=result.schedule,
        prediction=result.prediction,
        search=search,
    )


def _graph(layers: int, time_unit: TimeUnit) -> CostGraph:
    """A chain: the embedding, attention and MLP of each layer, the norm and the head."""
    nodes = [
        Node(
            name=module.replace(".", "_"),
            forward_ns=forward_ns,
            backward_ns=2 * forward_ns,
            backward_input_ns=forward_ns,
            backward_weight_ns=forward_ns,
            parameter_bytes=WEIGHT,
            saved_bytes=ACTIVATION,
            group=None,
            workspace_bytes=1 << 20,
            saved=(index,),
            parameters=(f"{module}.weight",),
            module=module,
        )
        for index, (module, forward_ns) in enumerate(_modules(layers))
    ]
    tensors = tuple(
        Tensor(
            producer=node.name,
            consumers=(behind.name,),
            bytes=ACTIVATION,
            gradient_bytes=ACTIVATION,
            storage=index,
        )
        for index, (node, behind) in enumerate(pairwise(nodes))
    )
    return CostGraph(
        time_unit=time_unit,
        nodes=tuple(nodes),
        tensors=tensors,
        storages=(ACTIVATION,) * len(nodes),
        parameters=tuple(
            Parameter(name=f"{node.module}.weight", bytes=WEIGHT, trainable=True) for node in nodes
        ),
    )


def _modules(layers: int) -> Iterator[tuple[str, int]]:
    first, *last = ENDS.items()
    yield first
    for layer in range(layers):
        yield from ((f"model.layers.{layer}.{part}", time) for part, time in TIMES.items())
    yield from last


def _even_cut(graph: CostGraph, k: int, moved: int) -> dict[str, int]:
    """The stage of each node: that in which the middle of the node's time lies."""
    total, before, stages = sum(node.forward_ns for node in graph.nodes), 0, []
    for node in graph.nodes:
        stages.append((2 * before + node.forward_ns) * k // (2 * total))
        before += node.forward_ns
    for cut in range(1, moved + 1):
        stages[stages.index(cut)] = cut - 1
    return {node.name: stage for node, stage in zip(graph.nodes, stages, strict=True)}
