"""The schedule problem of a plan's stages, and what the memory model leaves for it.

Callers are the phases that schedule, price or check a plan: times and bytes come from the stages,
transfer times from the links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

from pipecompile.ir.amount import AllocatorName, Amount
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.stage import ReplicaExchange, Stage
from pipecompile.ir.stage_ranks import stage_ranks, stages_on
from pipecompile.memory_model.action_workspace import between_halves
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.rank import (
    available_for_activations,
    most_for_activations,
    rank_memory,
)
from pipecompile.memory_model.snapshots import Snapshot
from pipecompile.schedule.named_orders import generate, held_microbatches, steady_microbatches
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.receives import add_earliest_receives
from pipecompile.schedule.snapshots_in_flight import snapshots_by_rank

__all__ = [
    "activation_caps",
    "excess_bytes",
    "memory_by_rank",
    "most_by_rank",
    "problem_of_plan",
    "problem_of_stages",
]


def problem_of_plan(plan: Plan) -> PlacedProblem:
    """Return the problem that the schedule of a plan answers."""
    placement = plan.schedule.placement
    caps = plan.options.caps(plan.ranks)
    available = activation_caps(plan.stages, placement, plan.microbatches, caps, plan.allocator)
    return problem_of_stages(plan.stages, plan.links, placement, plan.microbatches, available)


def problem_of_stages(
    stages: Sequence[Stage],
    links: Links,
    placement: Sequence[int],
    microbatches: int,
    caps: Sequence[int] | None = None,
) -> PlacedProblem:
    """Return the schedule problem of stages on ranks.

    Bytes are bounds, since caps are held against bounds. Each tensor at a boundary is a message of
    its own, since torch's runtime sends them one by one. The part of a message that occupies the
    rank itself is added to the action that it belongs to. Between stages with replicas messages
    take as long as over the slowest of their links.
    """
    boundaries, ranks = list(pairwise(placement)), max(placement) + 1
    pipeline = links.among(ranks)
    # crosses_ranks[s] is about the boundary before stage s; the ends have none.
    crosses_ranks = [False, *(left != right for left, right in boundaries), False]
    forward_ns, backward_ns, costs = [], [], []
    # Not strict: behind the last stage there is no boundary.
    for stage, (left, right) in zip(stages, pairwise(stage_ranks(placement)), strict=False):
        values = [tensor.bytes for tensor in stage.outputs]
        gradients = [tensor.gradient_bytes for tensor in stage.outputs]
        forward_ns.append(_under_way_ns(pipeline, product(left, right), values))
        backward_ns.append(_under_way_ns(pipeline, product(right, left), gradients))
    for index, (stage, sides) in enumerate(zip(stages, pairwise(crosses_ranks), strict=True)):
        own_ns = _message_ns(links, stage, *sides)
        ring = links.around_replicas(stage_ranks(placement)[index], ranks)
        sum_ns = _exchange_ns(ring, stage.replica_sum) + _tied_sums_ns(pipeline, stage)
        each_ns = _costs(stage, *own_ns, sum_ns, is_first=stage is stages[0])
        costs.append(_with_exchanges(each_ns, stage, ring))
    return PlacedProblem(
        placement=tuple(placement),
        microbatches=microbatches,
        costs=tuple(costs),
        forward_transfer_ns=tuple(forward_ns),
        backward_transfer_ns=tuple(backward_ns),
        # torch's runtime always waits for a message; without any gradient it is an empty one.
        gradient=(True,) * len(boundaries),
        caps=None if caps is None else tuple(caps),
    )


def _under_way_ns(links: Links, pairs: Iterable[tuple[int, int]], sizes: Sequence[int]) -> int:
    """Return how long messages of these sizes are under way, over the slowest of some links."""
    return max(sum(links.under_way_ns(*pair, size) for size in sizes) for pair in pairs)


def _message_ns(
    links: Links, stage: Stage, receives_inputs: bool, sends_outputs: bool
) -> tuple[int, int]:
    """Return the time of a stage's rank that messages take in its forward and in its backward.

    Messages are exchanged only with neighbours on other ranks.
    """
    inputs = stage.inputs if receives_inputs else ()
    outputs = stage.outputs if sends_outputs else ()
    sending_ns, receiving_ns = links.sending.transfer_ns, links.receiving.transfer_ns
    forward_ns = sum(receiving_ns(tensor.bytes) for tensor in inputs)
    forward_ns += sum(sending_ns(tensor.bytes) for tensor in outputs)
    backward_ns = sum(receiving_ns(tensor.gradient_bytes) for tensor in outputs)
    backward_ns += sum(sending_ns(tensor.gradient_bytes) for tensor in inputs)
    return forward_ns, backward_ns


def _exchange_ns(ring: Link, exchange: ReplicaExchange | None) -> int:
    """Return the time of an exchange with other replicas, over the slowest link of their ring.

    What is done once a step runs beside compute, after the last backward. What is exchanged before
    the first forward counts there too: the first stage begins first and ends last.
    """
    return 0 if exchange is None else exchange.messages * ring.transfer_ns(exchange.bytes)


def _with_exchanges(costs: StageCosts, stage: Stage, ring: Link) -> StageCosts:
    """Return the costs of a stage with what its actions exchange with other replicas.

    An action waits for the gather before it, and for the sum of its gradients (FSDP2 on the
    stream that computes), so both are a part of its time.
    """
    gather = _exchange_ns(ring, stage.action_gather)
    gather_and_sum = gather + _exchange_ns(ring, stage.backward_sum)
    return replace(
        costs,
        # An I needs the gathered weights too, but only W
        # completes gradients, and only these are summed.
        forward_ns=costs.forward_ns + gather,
        backward_ns=costs.backward_ns + gather_and_sum,
        backward_input_ns=costs.backward_input_ns + gather,
        backward_weight_ns=costs.backward_weight_ns + gather_and_sum,
        # A recompute is another forward, for which the weights are gathered once more.
        recompute_ns=costs.recompute_ns + (gather if costs.recompute else 0),
    )


def _tied_sums_ns(links: Links, stage: Stage) -> int:
    """Return the time of a stage's exchange with other ranks that hold its parameters.

    It begins when the last of them is done. Each rank adds it to its own end, so that the step ends
    at the right time; ranks that wait for the last one are shown as if they did not.
    """
    return sum(
        each.messages * links.around(each.ranks).transfer_ns(each.bytes) for each in stage.tied_sums
    )


def _costs(
    stage: Stage, forward_ns: int, backward_ns: int, sum_ns: int, *, is_first: bool
) -> StageCosts:
    """Return the costs of a stage, whose messages take so long in its forward, in its backward,
    and for its sum over replicas.

    The first stage has no input gradient: its I takes no time, and its W that of a full backward.
    """
    recomputes, footprint = stage.recomputes, stage.footprint
    kept = footprint.activations.bound
    # A forward that is recomputed keeps only what it sends and what it writes to.
    copies = footprint.buffer_copies.bound if recomputes else 0
    bare = footprint.outputs.bound + copies
    # A whole stage is recomputed by an action R, which can move into a wait. Regions are recomputed
    # and encodings decoded inside the backward, when it comes to them, and lengthen that.
    region_ns = stage.recompute_ns if stage.recompute == "regions" else 0
    encoding_ns = sum(run.forward_ns for run in stage.encoded_runs)
    decoding_ns = sum(run.backward_ns for run in stage.encoded_runs)
    # Regions are recomputed in a backward as a whole.
    halves = stage.backward_input_ns, stage.backward_weight_ns
    can_split = not stage.regions and None not in halves
    return StageCosts(
        forward_ns=stage.forward_ns + forward_ns + encoding_ns,
        backward_ns=stage.backward_ns + backward_ns + region_ns + decoding_ns,
        backward_input_ns=backward_ns + (0 if is_first else stage.backward_input_ns or 0),
        backward_weight_ns=stage.backward_ns if is_first else stage.backward_weight_ns or 0,
        recompute_ns=stage.recompute_ns if recomputes else 0,
        reduce_ns=stage.per_step_ns + sum_ns,
        kept_bytes=bare if recomputes else kept,
        recomputed_bytes=kept if recomputes else 0,
        between_bytes=copies
        + (between_halves(footprint) - footprint.outputs_freed_by_input_backward).bound,
        buffer_copy_bytes=copies,
        can_split=can_split,
        recompute=recomputes,
        except_last=stage.recompute == "except-last",
    )


def activation_caps(
    stages: Sequence[Stage],
    placement: Sequence[int],
    microbatches: int,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
    *,
    highest: bool = False,
) -> tuple[int, ...] | None:
    """Return the bytes that the caps of ranks leave for activations; None without caps.

    An order that holds no more activations than these fits, whatever it is. With `highest` they are
    caps that no order that fits exceeds: only what a rank always holds is subtracted.
    """
    if caps is None:
        return None
    rules, left = ALLOCATORS[allocator], []
    for rank, cap in enumerate(caps):
        footprints = footprints_on(stages, placement, rank)
        recomputed = {index for index in footprints if stages[index].recomputes}
        if highest:
            left.append(
                most_for_activations(footprints, cap, microbatches=microbatches, allocator=rules)
            )
        else:
            available = available_for_activations(
                footprints, cap, microbatches=microbatches, allocator=rules, recomputed=recomputed
            )
            left.append(max(0, available))
    return tuple(left)


def excess_bytes(
    stages: Sequence[Stage],
    schedule: Schedule,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
) -> tuple[int, ...]:
    """Return for each rank the bytes by which it may exceed its cap, under any times."""
    if caps is None:
        return (0,) * schedule.ranks
    memory = most_by_rank(stages, schedule, allocator)
    return tuple(max(0, rank.total.bound - cap) for rank, cap in zip(memory, caps, strict=True))


def memory_by_rank(
    stages: Sequence[Stage], schedule: Schedule, allocator: AllocatorName
) -> tuple[RankMemory, ...]:
    """Return what each rank holds at its peak, by the plan's memory model.

    What is expected follows from the receives of the schedule, which stand where its times put
    them. The bound holds for the order of its compute actions under any times.
    """
    lasting = _lasting(stages, schedule)
    # A receive allocates its buffer where it is posted, which is where the message
    # may first come. So predicted times decide what is expected, but must not decide
    # what is promised: such a bound would break with the first message that is early.
    in_time = snapshots_by_rank(lasting, schedule.microbatches)
    timed = _memory_of(stages, schedule, in_time, allocator)
    most = most_by_rank(stages, schedule, allocator)
    return tuple(map(_with_bound, timed, most))


def _with_bound(timed: RankMemory, most: RankMemory) -> RankMemory:
    """Return what is expected of one memory of a rank, with the bounds of another one."""
    kinds = {}
    for kind in RankMemory.__struct_fields__:
        expected, bound = getattr(timed, kind).expected, getattr(most, kind).bound
        kinds[kind] = Amount(expected=expected, bound=bound)
    return RankMemory(**kinds)


def most_by_rank(
    stages: Sequence[Stage], schedule: Schedule, allocator: AllocatorName
) -> tuple[RankMemory, ...]:
    """Return what each rank holds at its peak if messages come as early as any times allow."""
    lasting = _lasting(stages, schedule)
    order = Schedule.of(
        lasting.name,
        lasting.microbatches,
        lasting.placement,
        lasting.compute,
        lasting.weight_versions,
    )
    earliest = _earliest_snapshots(order, schedule.microbatches)
    return _memory_of(stages, schedule, earliest, allocator)


def _lasting(stages: Sequence[Stage], schedule: Schedule) -> Schedule:
    """Return an order in which ranks hold the most that they do while minibatches follow each
    other: the schedule itself, unless that has too few microbatches for that.
    """
    lasting = steady_microbatches(schedule.name, schedule.placement, schedule.microbatches)
    if lasting == schedule.microbatches:
        return schedule
    recompute = [stage.recomputes for stage in stages]
    return add_earliest_receives(generate(schedule.name, schedule.placement, lasting, recompute))


# Plans of several cuts under one order share them, and to find them takes longer than to use them.
@lru_cache(maxsize=4)
def _earliest_snapshots(order: Schedule, microbatches: int) -> tuple[tuple[Snapshot, ...], ...]:
    """Return the snapshots by rank of an order of compute actions."""
    return snapshots_by_rank(add_earliest_receives(order), microbatches)


def _memory_of(
    stages: Sequence[Stage],
    schedule: Schedule,
    snapshots: Iterable[Sequence[Snapshot]],
    allocator: AllocatorName,
) -> tuple[RankMemory, ...]:
    """Return the peaks of ranks whose rows have these snapshots."""
    held = held_microbatches(schedule.name, schedule.placement, schedule.microbatches)
    return tuple(
        rank_memory(
            footprints_on(stages, schedule.placement, rank),
            of_rank,
            microbatches=held,
            allocator=ALLOCATORS[allocator],
        )
        for rank, of_rank in enumerate(snapshots)
    )


def footprints_on(
    stages: Sequence[Stage], placement: Sequence[int], rank: int
) -> dict[int, Footprint]:
    """Return by stage the footprints of a rank's stages."""
    return {index: stages[index].footprint for index in stages_on(placement, rank)}
