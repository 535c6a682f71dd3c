"""Plans of given cuts, and random cuts, for tests of layouts."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from pipecompile.api.choices import requested_options
from pipecompile.ir.amount import Amount
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import Fingerprint, Plan, Prediction, Provenance, Search
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Idle, Schedule
from pipecompile.planner.recompute import recompute_planner
from pipecompile.recompute.stages import owners_of, stages_of

__all__ = ["cuts", "planned"]

NOTHING = Amount(expected=0, bound=0)


def planned(graph: CostGraph, assignment: Mapping[str, int]) -> Plan:
    """Return a plan with the stages of a cut, whose schedule and prediction nobody looks at."""
    k = max(assignment.values()) + 1
    options = requested_options(k=k, microbatches=1, schedule="gpipe", costs="flops")
    ranks = tuple(range(k))
    planner = recompute_planner(graph, options, ranks)
    stages = stages_of(graph, assignment, planner, with_memory=False)
    memory = RankMemory(**dict.fromkeys(RankMemory.__struct_fields__, NOTHING))
    return Plan(
        fingerprint=Fingerprint(graph="g", costs="c"),
        options=options,
        capture=Provenance(verified=False),
        k=k,
        ranks=k,
        stages_per_rank=1,
        replicas=1,
        microbatches=1,
        microbatch_shapes=(),
        links=FREE,
        allocator="cpu",
        stages=stages,
        routes=(),
        parameters=tuple(owners_of(graph, stages)),
        schedule=Schedule(
            name="gpipe", microbatches=1, placement=ranks, actions=tuple((f"{s}F0",) for s in ranks)
        ),
        prediction=Prediction(
            step_ns=1,
            span_ns=1,
            bubble=0.0,
            loads_ns=(1,) * k,
            idle=(Idle(dependency_ns=0, transfer_ns=0),) * k,
            memory=(memory,) * k,
        ),
        search=Search(
            objective="variance", method="", value=1, bound=1, gap=0.0, proven=True, values={}
        ),
    )


@st.composite
def cuts(draw: st.DrawFn, graph: CostGraph, *, most: int = 5) -> dict[str, int]:
    """Return any cut of a graph: stages grow along tensors, and each has a node."""
    inputs: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            inputs[consumer].append(tensor.producer)
    # Some places where a stage begins, and some nodes that begin the next one by themselves.
    begins = draw(st.sets(st.integers(1, len(graph.nodes) - 1), max_size=most - 1))
    late = draw(st.sets(st.integers(0, len(graph.nodes) - 1), max_size=2))
    stages: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        own = sum(begin <= place for begin in begins) + (place in late)
        stages[node.name] = max([own, *(stages[name] for name in inputs[node.name])])
    numbers = {stage: number for number, stage in enumerate(sorted(set(stages.values())))}
    return {name: numbers[stage] for name, stage in stages.items()}
