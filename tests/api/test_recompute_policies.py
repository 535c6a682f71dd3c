"""No policy by hand takes less time than what is chosen, at the memory that the policy needs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options, Recompute
from pipecompile.planner.recompute import recompute_planner
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import StageRecompute
from pipecompile.schedule.named_orders import MAY_SPLIT
from tests.ir.cost_graphs import cost_graphs, stages_of
from tests.recompute.test_nested_regions import chains
from tests.sweeps import examples

ORDERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1f1b", (0, 1)),
    ("gpipe", (0, 1)),
    ("zb-h1", (0, 1)),
    ("looped-bfs", (0, 1, 0, 1)),
    ("interleaved-1f1b", (0, 1, 0, 1)),
    ("zb-v", (0, 1, 1, 0)),
)
POLICIES: tuple[Recompute, ...] = ("none", "stage", "except-last", "block", "sqrt")


def in_blocks(graph: CostGraph, size: int) -> CostGraph:
    """So many nodes after each other are of one module."""
    nodes = (
        replace(node, module=f"blocks.{place // size}") for place, node in enumerate(graph.nodes)
    )
    return replace(graph, nodes=tuple(nodes))


@settings(max_examples=examples(100), deadline=None)
@given(
    cost_graphs(8, least=4) | chains(8),
    st.integers(1, 3),
    st.data(),
    st.sampled_from(POLICIES),
    st.sampled_from(ORDERS),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_no_policy_takes_less_at_its_own_peak(
    graph: CostGraph,
    size: int,
    data: st.DataObject,
    policy: Recompute,
    order: tuple[str, tuple[int, ...]],
    microbatches: int,
    settled: bool,
) -> None:
    schedule, placement = order
    names = data.draw(stages_of(graph, most=len(placement), least=len(placement)))
    assume(not (schedule in MAY_SPLIT and policy in ("block", "sqrt")))
    settled = settled or policy == "except-last"  # which is looked at once the cut is settled

    def choosing(recompute: Recompute, caps: tuple[int, ...]) -> RecomputePlanner:
        options = Options(
            k=len(placement),
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=len(placement) // 2,
            objective="variance",
            recompute=recompute,
            memory_bytes=caps,
            costs="table",
        )
        return recompute_planner(in_blocks(graph, size), options, placement, settled=settled)

    def of_rank(chosen: Sequence[StageRecompute | None], rank: int) -> dict[int, StageRecompute]:
        return {
            i: stage for i, stage in enumerate(chosen) if placement[i] == rank and stage is not None
        }

    by_hand = choosing(policy, (1, 1))
    theirs = [of_rank(by_hand.of_all(names), rank) for rank in range(2)]
    peaks = tuple(max(1, by_hand.policies.peak_bytes(stages)) for stages in theirs)
    auto = choosing("auto", peaks)
    ours = [of_rank(auto.of_all(names), rank) for rank in range(2)]
    for own, other, peak in zip(ours, theirs, peaks, strict=True):
        assert own.keys() == other.keys() and auto.policies.peak_bytes(own) <= peak
        assert auto.policies.mean_ns(own) <= auto.policies.mean_ns(other)
