from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.amount import Amount
from pipecompile.ir.footprint import AMOUNT_FIELDS, Footprint, MessageStorage, ReceivedTensor
from pipecompile.ir.links import Link, Links
from pipecompile.ir.stage import Boundary, ReplicaExchange, Stage, TiedSum
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.rank import activation_curve
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, problem_of_stages

LINK = Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=5))


def _footprint(kept: int, outputs: int) -> Footprint:
    sizes = dict.fromkeys(AMOUNT_FIELDS, 100) | {"activations": kept}
    sizes |= {
        "added_by_input_backward": 7,
        "freed_by_input_backward": 5,
        "optimizer_workspace": 0,
        "buffer_copies": 3,
        "gradient_copies": 0,
        "gathered": 0,
        "backward_sum_peak": 0,
        "kv_cache": 0,
    }
    amounts = {name: Amount(expected=size, bound=size) for name, size in sizes.items()}
    return Footprint(
        **amounts,
        received=(_received(100),),
        received_gradients=(_received(100),),
        sent_outputs=(_parcel(outputs - 2, needed=True), _parcel(2, needed=False)),
        sent_by_backward=(_parcel(100, needed=False),),
        sent_by_input_backward=(_parcel(100, needed=False),),
    )


def _received(size: int) -> ReceivedTensor:
    return ReceivedTensor(
        name="x",
        size=Amount(expected=size, bound=size),
        is_needed_by_weight_backward=False,
    )


def _parcel(size: int, *, needed: bool) -> MessageStorage:
    return MessageStorage(
        names=(), size=Amount(expected=size, bound=size), is_needed_by_weight_backward=needed
    )


def _boundary(size: int, gradient: int) -> tuple[Boundary, ...]:
    return (
        Boundary(name="x", bytes=size, gradient_bytes=gradient),
        Boundary(name="ids", bytes=8, gradient_bytes=0),
    )


def _stages(
    *, recompute: Literal["none", "stage", "except-last"] = "none", halves: int | None = 6
) -> tuple[Stage, ...]:
    boundaries = [(), _boundary(100, 50), _boundary(200, 60), ()]
    return tuple(
        Stage(
            blocks=((f"n{index}",),),
            modules=(),
            groups=(),
            forward_ns=5 + index,
            backward_ns=10,
            backward_input_ns=halves,
            backward_weight_ns=halves,
            recompute_ns=5 + index if recompute != "none" and index < 2 else 0,
            inputs=boundaries[index],
            outputs=boundaries[index + 1],
            recompute=recompute if index < 2 else "none",
            footprint=_footprint(40 + index, 10),
        )
        for index in range(3)
    )


def test_each_tensor_of_a_boundary_is_a_message_and_one_without_a_gradient_has_none_back() -> None:
    problem = problem_of_stages(_stages(), LINK, range(3), 2)
    assert problem.forward_transfer_ns == (100 + 8 + 2 * 5, 200 + 8 + 2 * 5)
    assert problem.backward_transfer_ns == (50 + 5, 60 + 5)
    assert problem.gradient == (True, True)


def test_within_a_rank_nothing_is_sent() -> None:
    problem = problem_of_stages(_stages(), LINK, [0, 0, 1], 2)
    assert (problem.forward_transfer_ns[0], problem.backward_transfer_ns[0]) == (0, 0)
    assert problem.forward_transfer_ns[1] > 0


def test_the_first_stage_has_no_gradients_of_inputs_to_compute() -> None:
    first, second, _ = problem_of_stages(_stages(), LINK, range(3), 2).costs
    assert (first.backward_input_ns, first.backward_weight_ns, first.backward_ns) == (0, 10, 10)
    assert (second.backward_input_ns, second.backward_weight_ns) == (6, 6)


def test_a_backward_whose_halves_were_not_measured_does_not_split() -> None:
    assert problem_of_stages(_stages(), LINK, range(3), 2).can_split
    assert not problem_of_stages(_stages(halves=None), LINK, range(3), 2).can_split


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 6),
    st.sampled_from(["none", "stage", "except-last"]),
)
def test_the_peak_is_that_of_the_memory_model(
    name: str, microbatches: int, recompute: Literal["none", "stage", "except-last"]
) -> None:
    stages = _stages(recompute=recompute)
    except_last = recompute == "except-last"
    schedule = generate(name, range(3), microbatches, recompute != "none", except_last=except_last)
    timeline = simulate(problem_of_stages(stages, LINK, range(3), microbatches), schedule)
    for rank, row in enumerate(schedule.rows):
        curve = activation_curve({rank: stages[rank].footprint}, row)
        assert list(timeline.held_bytes[rank]) == [held.bound for _, held in curve]


def test_the_cap_of_activations_is_what_all_else_leaves() -> None:
    """Each of these takes 100 bytes: parameters, gradients, optimizer, the most of a backward, and
    for each of three microbatches its input, two messages, and its input gradient.
    """
    cpu = ALLOCATORS["cpu"]
    needed = 4 * 100 + 3 * 4 * 100
    assert (
        activation_caps(_stages(), range(3), 3, [cpu.padded(0, needed + 100, 0)] * 3, "cpu")
        == (100,) * 3
    )
    assert (
        activation_caps(_stages(), range(3), 3, [cpu.padded(0, needed - 1, 0)] * 3, "cpu")
        == (0,) * 3
    )
    assert activation_caps(_stages(), range(3), 3, None, "cpu") is None


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_stage_that_recomputes_keeps_its_outputs_and_from_the_recompute_on_everything(
    recompute: str,
) -> None:
    """It also holds copies of the buffers that it writes to until then."""
    stages = tuple(msgspec.structs.replace(stage, recompute=recompute) for stage in _stages())
    costs = problem_of_stages(stages, LINK, range(3), 2).costs[1]
    wanted = {"none": (41, 0, 41 + 7 - 5 - 2), "stage": (10 + 3, 41, 3 + 41 + 7 - 5 - 2)}[recompute]
    assert (costs.kept_bytes, costs.recomputed_bytes, costs.between_bytes) == wanted


def test_each_hop_has_the_links_of_its_ranks_there_and_back() -> None:
    delays = ((0, 1, 20), (300, 0, 4000), (50000, 600000, 0))
    links = Links(bandwidth_bytes_per_s=None, latency_ns=delays)
    problem = problem_of_stages(_stages(), links, [0, 2, 1], 2)
    # Two tensors go forward, and one gradient goes back. Stages 0, 1, 2 lie on ranks 0, 2, 1.
    assert problem.forward_transfer_ns == (2 * 20, 2 * 600000)
    assert problem.backward_transfer_ns == (50000, 4000)


def test_replicas_sum_gradients_around_a_ring_as_fast_as_its_slowest_link() -> None:
    sums = ReplicaExchange(messages=4, bytes=100)
    stages = tuple(
        msgspec.structs.replace(stage, per_step_ns=7, replica_sum=sums) for stage in _stages()
    )
    alike = problem_of_stages(stages, LINK, range(3), 2)
    assert [costs.reduce_ns for costs in alike.costs] == [7 + 4 * (100 + 5)] * 3
    # Three replicas of three ranks. Rank 1 of them are 1, 4 and 7; only from 7 to 1 is slow.
    delays = [[1] * 9 for _ in range(9)]
    delays[7][1] = 50
    links = Links(bandwidth_bytes_per_s=None, latency_ns=tuple(map(tuple, delays)))
    one_slow = problem_of_stages(stages, links, range(3), 2)
    assert [costs.reduce_ns for costs in one_slow.costs] == [7 + 4, 7 + 4 * 50, 7 + 4]


def test_actions_wait_for_what_they_gather_and_sum() -> None:
    gather = ReplicaExchange(messages=3, bytes=100)
    backward_sum = ReplicaExchange(messages=2, bytes=40)
    plain = problem_of_stages(_stages(recompute="stage"), LINK, range(3), 2)
    stages = tuple(
        msgspec.structs.replace(stage, action_gather=gather, backward_sum=backward_sum)
        for stage in _stages(recompute="stage")
    )
    divided = problem_of_stages(stages, LINK, range(3), 2)
    gather_ns, sum_ns = 3 * (100 + 5), 2 * (40 + 5)
    for before, after in zip(plain.costs, divided.costs, strict=True):
        assert after.forward_ns - before.forward_ns == gather_ns
        assert after.backward_input_ns - before.backward_input_ns == gather_ns
        assert after.recompute_ns - before.recompute_ns == (gather_ns if before.recompute else 0)
        assert after.backward_ns - before.backward_ns == gather_ns + sum_ns
        assert after.backward_weight_ns - before.backward_weight_ns == gather_ns + sum_ns
        assert after.reduce_ns == before.reduce_ns


def test_a_step_ends_with_the_sums_of_tied_parameters() -> None:
    tied = TiedSum(ranks=(0, 2), messages=2, bytes=100)
    first, middle, last = _stages()
    stages = (
        msgspec.structs.replace(first, tied_sums=(tied, tied)),
        middle,
        msgspec.structs.replace(last, per_step_ns=7, tied_sums=(tied,)),
    )
    problem = problem_of_stages(stages, LINK, range(3), 2)
    each = 2 * (100 + 5)
    assert [costs.reduce_ns for costs in problem.costs] == [2 * each, 0, 7 + each]


def test_what_a_message_takes_of_its_ranks_is_part_of_their_actions() -> None:
    links = msgspec.structs.replace(LINK, sending=Link(latency_ns=2), receiving=Link(latency_ns=1))
    problem, without = (
        problem_of_stages(_stages(), given, [0, 1, 1], 2) for given in (links, LINK)
    )
    assert problem.forward_transfer_ns == (without.forward_transfer_ns[0] - 2 * (2 + 1), 0)
    assert problem.backward_transfer_ns == (without.backward_transfer_ns[0] - (2 + 1), 0)
    # Stage 0 sends two tensors and receives a gradient, stage 1 the other way around; stages 1
    # and 2 share a rank.
    spent = [
        (costs.forward_ns - other.forward_ns)
        for costs, other in zip(problem.costs, without.costs, strict=True)
    ]
    assert spent == [2 * 2, 2 * 1, 0]
    for kind in ("backward_ns", "backward_input_ns"):
        pairs = zip(problem.costs, without.costs, strict=True)
        assert [getattr(costs, kind) - getattr(other, kind) for costs, other in pairs] == [1, 2, 0]
    assert [costs.backward_weight_ns for costs in problem.costs] == [
        costs.backward_weight_ns for costs in without.costs
    ]
