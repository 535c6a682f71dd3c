"""What stages hold because there are replicas, against torch and by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import CostGraph, Node, Parameter
from pipecompile.ir.plan import ShardLevel
from pipecompile.ir.schedule import Action, Kind
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.memory_model.rank import rank_memory
from pipecompile.memory_model.replicas import BUCKET_BYTES, buckets, copied_bytes, part_of
from pipecompile.memory_model.snapshots import all_snapshots
from pipecompile.memory_model.stage import footprint_of

SHAPES = {"weight": (5, 6), "bias": (5,), "frozen": (7, 4)}


@given(
    st.lists(st.integers(1, 2 * BUCKET_BYTES), max_size=12),
    st.lists(st.sampled_from("ab"), min_size=12, max_size=12),
)
def test_buckets_are_runs_of_one_type_that_are_small_or_one(
    sizes: list[int], types: list[str]
) -> None:
    runs = list(buckets(sizes, types[: len(sizes)]))
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert len({types[index] for index in run}) == 1
        assert len(run) == 1 or sum(sizes[index] for index in run) <= BUCKET_BYTES
    # None could have been longer.
    for run, following in pairwise(runs):
        longer = sum(sizes[index] for index in run) + sizes[following[0]]
        assert longer > BUCKET_BYTES or types[run[0]] != types[following[0]]


def test_a_gradient_of_its_own_bucket_is_not_copied() -> None:
    large = BUCKET_BYTES + 4
    assert list(copied_bytes([8, 4, large, 4, 12])) == [12, 16]
    assert list(copied_bytes([large])) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 5))
def test_a_part_has_the_rows_that_the_first_rank_gets_of_torch(
    shape: list[int], replicas: int
) -> None:
    parameter = Parameter(
        name="p", bytes=4 * torch.Size(shape).numel(), trainable=True, shape=tuple(shape)
    )
    first = torch.empty(shape).chunk(replicas)[0]
    part = part_of(parameter, replicas)
    assert (part.shape, part.bytes) == (tuple(first.shape), first.nbytes)


def _footprint(
    replicas: int = 1, *, shard: ShardLevel | None = None, allocator: AllocatorName = "cuda"
) -> Footprint:
    parameters = tuple(
        Parameter(
            name=name,
            bytes=4 * torch.Size(shape).numel(),
            trainable=name != "frozen",
            shape=shape,
        )
        for name, shape in SHAPES.items()
    )
    node = Node(
        name="n",
        forward_ns=1,
        backward_ns=1,
        parameter_bytes=0,
        saved_bytes=0,
        group=None,
        parameters=tuple(SHAPES),
    )
    graph = CostGraph(nodes=(node,), tensors=(), parameters=parameters, allocator=allocator)
    return footprint_of(LiveRanges(graph, "adam", False, replicas, shard), [], ["n"])


def test_replicas_copy_small_gradients_and_have_peers() -> None:
    alone, two = _footprint(), _footprint(replicas=2)
    assert (alone.gradient_copies.expected, alone.replica_peers) == (0, 0)
    assert (two.gradient_copies.expected, two.replica_peers) == (4 * (30 + 5), 1)
    assert _footprint(replicas=3).replica_peers == 2
    kept = {"gradient_copies": alone.gradient_copies, "replica_peers": 0}
    assert replace(two, **kept) == alone


def test_sharded_stages_hold_parts_of_state_and_the_whole_parameters_in_a_step() -> None:
    alone, two = _footprint(), _footprint(replicas=2, shard="optimizer")
    # 3 of 5 rows, 3 of 5 elements, and 4 of 7 rows.
    parts = 4 * (3 * 6 + 3 + 4 * 4)
    assert two.parameters.expected == alone.parameters.expected + parts
    assert two.gradients == alone.gradients
    assert two.gradient_copies.expected == 0
    trained = [
        Parameter(name="w", bytes=72, trainable=True, shape=(3, 6)),
        Parameter(name="b", bytes=12, trainable=True, shape=(3,)),
    ]
    state, workspace = optimizer_bytes(trained, "adam", master_weights=False, lists=True)
    assert two.optimizer.expected == sum(state)
    # A gather of all parameters takes 4 · 63 bytes twice, and there are no gradients yet.
    assert two.optimizer_workspace.expected == max(workspace, 4 * 28)


# 3 of 5 rows, 3 of 5 elements, and 4 of 7 rows; only the first two are trained.
WHOLE, TRAINED = 4 * (30 + 5 + 28), 4 * (30 + 5)
PART, TRAINED_PART = 4 * (18 + 3 + 16), 4 * (18 + 3)


def test_a_backward_that_sums_leaves_a_part_of_its_gradients() -> None:
    whole, divided = (_footprint(replicas=2, shard=each) for each in ("optimizer", "gradients"))
    assert divided.gradients.expected == TRAINED_PART
    assert divided.parameters == whole.parameters
    assert divided.optimizer == whole.optimizer
    assert divided.replica_sum_peak.expected == 0
    # The gradients are copied into a message and freed; then a part comes back.
    assert divided.backward_sum_peak.expected == 2 * TRAINED
    on_gloo = _footprint(replicas=2, shard="gradients", allocator="cpu")
    assert on_gloo.backward_sum_peak.expected == 2 * TRAINED + TRAINED // 2


def test_parameters_that_are_gathered_for_each_action_are_a_part_between_them() -> None:
    divided = _footprint(replicas=2, shard="parameters")
    assert divided.parameters.expected == PART
    assert divided.gathered.expected == WHOLE
    assert divided.gradients.expected == TRAINED_PART
    # They are freed before gradients are summed, and these are still there.
    assert divided.backward_sum_peak.expected == max(TRAINED, 2 * TRAINED - WHOLE)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_a_rank_makes_whole_gradients_in_each_backward(shard: ShardLevel) -> None:
    footprint = _footprint(replicas=2, shard=shard)
    row = [Action(0, kind, index) for index in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    allocator = ALLOCATORS["cpu"]
    peaks = {
        (snapshot.kind, bool(snapshot.states[0].has_gradients)): rank_memory(
            {0: footprint}, [snapshot], microbatches=2, allocator=allocator
        )
        for snapshot in all_snapshots(row)
    }
    gathered, summed = footprint.gathered.expected, footprint.backward_sum_peak.expected
    for has_gradients in (False, True):
        memory = peaks[Kind.BACKWARD, has_gradients]
        # A gather has parameters twice, and is done when the backward begins.
        assert memory.workspace.expected == gathered + max(gathered, summed)
        assert memory.gradients.expected == TRAINED_PART * has_gradients
    forward = peaks[Kind.FORWARD, True]
    assert forward.workspace.expected == 2 * gathered


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_part_of_parameters_without_names_is_rounded_up(shard: ShardLevel | None) -> None:
    node = Node(
        name="n", forward_ns=1, backward_ns=1, parameter_bytes=101, saved_bytes=0, group=None
    )
    ranges = LiveRanges(CostGraph(nodes=(node,), tensors=()), None, False, 2, shard)
    footprint = footprint_of(ranges, [], ["n"])
    assert footprint.parameters.expected == 101 + 51 * (shard is not None)
