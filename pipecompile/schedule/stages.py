"""The schedule problem of a plan's stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Plan, Stage
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Schedule
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.rank import ceiling, rank_memory, room
from pipecompile.memory_model.snapshots import moments
from pipecompile.schedule.problem import PlacedProblem, StageCosts

__all__ = ["activation_caps", "excess_of", "memory_by_rank", "problem_of_plan", "problem_of_stages"]


def problem_of_plan(plan: Plan) -> PlacedProblem:
    """What the schedule of `plan` answers."""
    placement = plan.schedule.placement
    given = plan.options.caps(plan.ranks)
    caps = activation_caps(plan.stages, placement, plan.microbatches, given, plan.allocator)
    return problem_of_stages(plan.stages, plan.links, placement, plan.microbatches, caps)


def problem_of_stages(
    stages: Sequence[Stage],
    links: Links,
    placement: Sequence[int],
    microbatches: int,
    caps: Sequence[int] | None = None,
) -> PlacedProblem:
    """Bytes are bounds, as caps are judged on; tensors that stages pass on travel with the boundary between them.

    Each tensor is a message: torch's runtime sends those of a boundary one by one. What a message takes of a rank's
    own time is part of the action that it belongs to.
    """
    ends = list(pairwise(placement))
    away = [False, *(left != right for left, right in ends), False]
    forward = [
        sum(links.under_way_ns(here, there, tensor.bytes) for tensor in stage.outputs)
        for stage, (here, there) in zip(stages, ends, strict=False)
    ]
    backward = [
        sum(links.under_way_ns(there, here, tensor.gradient_bytes) for tensor in stage.outputs)
        for stage, (here, there) in zip(stages, ends, strict=False)
    ]
    spent = [
        _spent_ns(links, stage, *sides) for stage, sides in zip(stages, pairwise(away), strict=True)
    ]
    costs = [
        _work(stage, *own, is_first=stage is stages[0])
        for stage, own in zip(stages, spent, strict=True)
    ]
    return PlacedProblem(
        placement=tuple(placement),
        microbatches=microbatches,
        costs=tuple(costs),
        forward_transfer_ns=tuple(forward),
        backward_transfer_ns=tuple(backward),
        # torch's runtime always waits for a message; where no tensor carries a gradient it is empty.
        gradient=(True,) * len(ends),
        caps=None if caps is None else tuple(caps),
    )


def _spent_ns(links: Links, stage: Stage, before: bool, after: bool) -> tuple[int, int]:
    """What messages take of a stage's rank in its forward and in its backward; its neighbours may be elsewhere."""
    inputs, outputs = stage.inputs if before else (), stage.outputs if after else ()
    sent, received = links.sending.transfer_ns, links.receiving.transfer_ns
    forward = sum(received(tensor.bytes) for tensor in inputs) + sum(
        sent(tensor.bytes) for tensor in outputs
    )
    backward = [received(tensor.gradient_bytes) for tensor in outputs]
    return forward, sum(backward) + sum(sent(tensor.gradient_bytes) for tensor in inputs)


def _work(stage: Stage, forward_ns: int, backward_ns: int, *, is_first: bool) -> StageCosts:
    """With what messages take in the forward and in the backward.

    The first stage has no gradients of inputs to compute: its I is nothing, its W the whole backward.
    """
    again, footprint = stage.recomputes, stage.footprint
    held, without_versions = (
        footprint.kept.bound,
        (footprint.outputs + footprint.written).bound * again,
    )
    remade = footprint.remade.bound * again
    inside = stage.recompute_ns if stage.recompute == "regions" else 0
    packing = sum(run.forward_ns for run in stage.saving)
    unpacking = sum(run.backward_ns for run in stage.saving)
    can_split = stage.backward_input_ns is not None and stage.backward_weight_ns is not None
    return StageCosts(
        forward_ns=stage.forward_ns + forward_ns + packing,
        backward_ns=stage.backward_ns + backward_ns + inside + unpacking,
        backward_input_ns=backward_ns + (0 if is_first else stage.backward_input_ns or 0),
        backward_weight_ns=stage.backward_ns if is_first else stage.backward_weight_ns or 0,
        recompute_ns=stage.recompute_ns if again else 0,
        reduce_ns=stage.finish_ns,
        kept_bytes=without_versions if again else held,
        recomputed_bytes=held if again else 0,
        # torch keeps everything until the gradients of the weights
        between_bytes=held
        + without_versions
        + (footprint.between - footprint.dropped).bound
        - remade,
        remade_bytes=remade,
        can_split=can_split,
        recompute=again,
        except_last=stage.recompute == "except-last",
    )


def activation_caps(
    stages: Sequence[Stage],
    placement: Sequence[int],
    microbatches: int,
    given: Sequence[int] | None,
    allocator: AllocatorName,
    *,
    highest: bool = False,
) -> tuple[int, ...] | None:
    """What the caps `given` for ranks leave for activations, whatever the order: one that keeps no more fits.

    `highest` caps are those that no order that fits is over: they leave out all but what a rank always holds.
    """
    if given is None:
        return None
    taken, caps = ALLOCATORS[allocator], []
    for rank, cap in enumerate(given):
        held = stages_on(stages, placement, rank)
        again = {index for index in held if stages[index].recomputes}
        if highest:
            caps.append(ceiling(held, cap, microbatches=microbatches, allocator=taken))
        else:
            left = room(held, cap, microbatches=microbatches, allocator=taken, recomputed=again)
            caps.append(max(0, left))
    return tuple(caps)


def excess_of(
    stages: Sequence[Stage],
    schedule: Schedule,
    caps: Sequence[int] | None,
    allocator: AllocatorName,
) -> tuple[int, ...]:
    """Per rank the bytes that it may hold over its cap."""
    if caps is None:
        return (0,) * schedule.ranks
    held = memory_by_rank(stages, schedule, allocator)
    return tuple(max(0, rank.total.bound - cap) for rank, cap in zip(held, caps, strict=True))


def memory_by_rank(
    stages: Sequence[Stage], schedule: Schedule, allocator: AllocatorName
) -> tuple[RankMemory, ...]:
    """What each rank holds at its peak, by the plan's memory model."""
    pairs = (
        (stages_on(stages, schedule.placement, rank), row) for rank, row in enumerate(schedule.rows)
    )
    microbatches, taken = schedule.microbatches, ALLOCATORS[allocator]
    return tuple(
        rank_memory(h, moments(row), microbatches=microbatches, allocator=taken) for h, row in pairs
    )


def stages_on(stages: Sequence[Stage], placement: Sequence[int], rank: int) -> dict[int, Footprint]:
    """What the stages of a rank hold, by stage."""
    return {
        index: stage.footprint for index, stage in enumerate(stages) if placement[index] == rank
    }
