"""What stages exchange with replicas, and the sums of tied parameters that they end with, by hand.

A rank sums a tie when all of its actions are done. Of its stages the first one is done last. In a
ring of n ranks that all hold B bytes, each rank sends 2 (n - 1) messages of B / n bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node, Parameter
from pipecompile.ir.plan import SHARD_LEVELS, Options, ShardLevel
from pipecompile.ir.stage import Stage, TiedSum
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.schedule_view import ScheduleView
from pipecompile.recompute.stages import stages_of

TABLE, MASK = 1000, 60


def _stages(
    readers: Mapping[str, Sequence[int]],
    placement: Sequence[int],
    replicas: int,
    shard: ShardLevel | None,
) -> tuple[Stage, ...]:
    """The stages of a plan with one node for each stage of `placement`, where `readers` are the
    stages that read a parameter: "table" and "scale" are trained, and "mask" is not.
    """
    nodes = tuple(
        Node(
            name=f"n{stage}",
            forward_ns=1,
            backward_ns=1,
            parameter_bytes=0,
            saved_bytes=0,
            group=None,
            parameters=tuple(name for name, stages in readers.items() if stage in stages),
        )
        for stage in range(len(placement))
    )
    parameters = (
        Parameter(name="table", bytes=TABLE, trainable=True),
        Parameter(name="scale", bytes=8, trainable=True),
        Parameter(name="mask", bytes=MASK, trainable=False),
    )
    options = Options(
        k=len(placement),
        microbatches=4,
        schedule="1f1b",
        objective="variance",
        recompute="none",
        memory_bytes=None,
        costs="flops",
        replicas=replicas,
        shard=shard,
    )
    graph = CostGraph(nodes=nodes, tensors=(), storages=(), parameters=parameters)
    view = ScheduleView(tuple(placement), (1,) * len(placement), False, lambda *_: ())
    assignment = {node.name: stage for stage, node in enumerate(nodes)}
    planner = RecomputePlanner(graph, options, view)
    return stages_of(graph, assignment, planner, with_memory=False)


def _tied_sums(
    readers: Mapping[str, Sequence[int]],
    placement: Sequence[int],
    *,
    replicas: int = 1,
    shard: ShardLevel | None = None,
) -> list[tuple[TiedSum, ...]]:
    return [stage.tied_sums for stage in _stages(readers, placement, replicas, shard)]


def test_both_ends_of_a_tie_sum_it() -> None:
    halves = TiedSum(ranks=(0, 3), messages=2, bytes=500)
    assert _tied_sums({"table": (0, 3)}, (0, 1, 2, 3)) == [(halves,), (), (), (halves,)]


def test_three_ranks_send_four_messages_of_a_third() -> None:
    # 1000 bytes are 334, 333 and 333: the ring waits for the largest part.
    thirds = TiedSum(ranks=(0, 1, 3), messages=4, bytes=334)
    assert _tied_sums({"table": (0, 1, 3)}, (0, 1, 2, 3)) == [(thirds,), (thirds,), (), (thirds,)]


def test_each_tie_is_a_sum_of_its_own() -> None:
    table = TiedSum(ranks=(0, 1), messages=2, bytes=500)
    scale = TiedSum(ranks=(1, 2), messages=2, bytes=4)
    sums = _tied_sums({"table": (0, 1), "scale": (1, 2)}, (0, 1, 2))
    assert [sorted(each, key=lambda one: one.bytes) for each in sums] == [
        [table],
        [scale, table],
        [scale],
    ]


@pytest.mark.parametrize(("shard", "size"), [(None, 500), ("optimizer", 250), ("parameters", 250)])
def test_each_replica_sums_what_it_holds(shard: ShardLevel | None, size: int) -> None:
    halves = TiedSum(ranks=(0, 1), messages=2, bytes=size)
    sums = _tied_sums({"table": (0, 1)}, (0, 1), replicas=2, shard=shard)
    assert sums == [(halves,), (halves,)]


def test_parts_of_shards_are_rounded_up() -> None:
    # 1000 bytes in 3 shards are at most 334, and those in halves 167.
    sums = _tied_sums({"table": (0, 1)}, (0, 1), replicas=3, shard="optimizer")
    assert [each[0].bytes for each in sums] == [167, 167]


def test_a_rank_sums_once_after_the_stage_that_it_ends_with() -> None:
    halves = TiedSum(ranks=(0, 1), messages=2, bytes=500)
    # Stages 1, 2 and 3 read it. Rank 0 has stages 0 and 2 and ends with 0; rank 1 ends with 1.
    assert _tied_sums({"table": (1, 2, 3)}, (0, 1, 0, 1)) == [(halves,), (halves,), (), ()]
    # There and back: rank 1 holds stages 1 and 2, rank 0 the ends.
    assert _tied_sums({"table": (0, 2)}, (0, 1, 1, 0)) == [(halves,), (halves,), (), ()]


@pytest.mark.parametrize(
    ("readers", "placement"),
    [
        ({"table": (0,)}, (0, 1)),
        ({"mask": (0, 1)}, (0, 1)),
        ({"table": (0, 3)}, (0, 1, 1, 0)),
        ({}, (0, 1)),
    ],
    ids=["read once", "not trained", "on one rank", "not read"],
)
def test_without_a_tie_over_ranks_there_is_no_sum(
    readers: Mapping[str, Sequence[int]], placement: Sequence[int]
) -> None:
    assert not any(_tied_sums(readers, placement))


@given(st.integers(1, 9), st.integers(1, 16), st.sampled_from([None, *SHARD_LEVELS]))
def test_replicas_send_what_zero_says(
    replicas: int, microbatches: int, shard: ShardLevel | None
) -> None:
    # Rajbhandari et al. 2020, section 7, by the bytes that a rank sends in a step: a reduce-scatter
    # of gradients and an all-gather each send (n - 1) / n of them, rounded up by message.
    (stage,) = _stages({"table": (0,), "mask": (0,)}, (0,), replicas, shard)
    trained, held = TABLE, TABLE + MASK
    actions = 2 * microbatches  # a forward and a backward each
    sums = {None: 1, "optimizer": 1}.get(shard, microbatches)
    gathers = {None: 1, "optimizer": 1, "gradients": 1}.get(shard, actions)
    gathered = trained if shard is None else held
    wanted = Fraction(replicas - 1, replicas) * (sums * trained + gathers * gathered)
    times = [(stage.replica_sum, 1), (stage.backward_sum, microbatches)]
    times.append((stage.action_gather, actions))
    exchanges = [(each, count) for each, count in times if each is not None]
    sent = sum(each.messages * each.bytes * count for each, count in exchanges)
    rounded = sum(each.messages * count for each, count in exchanges)
    assert wanted <= sent < wanted + max(rounded, 1)
