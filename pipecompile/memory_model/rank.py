"""The one memory model: what stages hold and the order of actions give a rank's bytes by kind.

stage.py says what a stage holds for one microbatch, and the most that lives while it computes.
snapshots.py says how many microbatches are in which state as each action begins. A rank then holds:

    parameters    with buffers                           always
    optimizer     its state                              always
    kv_cache      of the tokens that a plan reserves     always
    gradients     of parameters                          from the first backward of a stage on
    activations   what microbatches in flight keep       from the forward to the backward
    buffers       the minibatch where it is read         always, for all microbatches
                  what was received                      from its RECV to the backward
                  gradients that were sent               until they were read (unread_gradients.py)
                  copies of small gradients              from a stage's last backward to the end
    workspace     the most that lives in the action      while it runs

That is what the runtime does: a receive makes its buffer when it is posted, and what was sent is
freed when the order of actions says that it was read (runtime/messages.py). A peak is that of one
moment: kinds that peak at other moments are not added up.

Each figure comes twice. `expected` counts the bytes that are asked for. `bound` is what an
allocator may take for them, see allocator.py. Planners and reports call these functions; nobody
else counts bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Action, Kind
from pipecompile.memory_model.action_workspace import (
    most_in_actions,
    optimizer_workspace,
    workspace_of_action,
)
from pipecompile.memory_model.allocator import ALLOCATORS, Allocator
from pipecompile.memory_model.handover import most_handed_over
from pipecompile.memory_model.holdings import (
    RankHoldings,
    activations_of,
    counted_once,
    has_copies,
    kv_cache_of,
    minibatch_of,
    steps_on_copies,
    summed,
)
from pipecompile.memory_model.messages import StageMessages
from pipecompile.memory_model.peak_snapshots import peak_snapshots
from pipecompile.memory_model.snapshots import Snapshot, StageState, all_snapshots, states
from pipecompile.memory_model.unread_gradients import unread_gradients

__all__ = [
    "BackwardAllowance",
    "activation_changes",
    "activation_curve",
    "available_for_activations",
    "backward_allowances",
    "fixed_bytes",
    "memory_by_stage",
    "memory_of_actions",
    "most_for_activations",
    "neighbour_ranks",
    "rank_memory",
    "stage_memory",
]

Size = TypeVar("Size", int, Amount)
BACKWARD_PEAKS = ("first_backward_peak", "backward_peak")


class BackwardAllowance(NamedTuple):
    """What a stage may take when one of its backwards begins.

    `bytes` are for the activations of its `in_flight` microbatches, the one of this backward
    included, and for what lives in that backward. `has_gradients` is 1 if the gradients of
    parameters exist already; they then do not count among these bytes.
    """

    in_flight: int
    bytes: int
    has_gradients: int


# -- what a rank holds


def rank_memory(
    stages: Mapping[int, Footprint],
    snapshots: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> RankMemory:
    """Return the peak of a rank that holds `stages` (by index) and goes through `snapshots`."""
    holdings = RankHoldings(stages, microbatches, allocator)
    candidates = [holdings.at(snapshot) for snapshot in snapshots]
    # The two may be peaks of different moments. Each has its own kinds, which add up to it.
    expected = max(candidates, key=lambda memory: memory.total.expected)
    padded = [_padded(memory, allocator, neighbour_ranks(stages)) for memory in candidates]
    most = max(padded)
    bound = candidates[padded.index(most)]
    # What the allocator takes beyond storages is part of the workspace's bound.
    margin = most - bound.total.bound
    kinds = {
        kind: Amount(expected=getattr(expected, kind).expected, bound=getattr(bound, kind).bound)
        for kind in RankMemory.__struct_fields__
    }
    kinds["workspace"] += Amount(expected=0, bound=margin)
    return RankMemory(**kinds)


def stage_memory(
    stages: Mapping[int, Footprint],
    snapshots: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> dict[int, RankMemory]:
    """Return which part of a rank's expected peak belongs to each of its stages.

    A parameter that several stages read belongs to the first, the workspace to the stage that acts.
    Bounds are without what an allocator adds to the whole rank.
    """
    holdings = RankHoldings(stages, microbatches, allocator)
    peak = max(snapshots, key=lambda snapshot: holdings.at(snapshot).total.expected)
    is_copied, is_stepped = has_copies(stages, peak), steps_on_copies(stages, peak)
    with_gradients = {
        index: stage
        for index, stage in stages.items()
        if peak.states[index].has_gradients or is_copied
    }
    return {
        index: RankMemory(
            parameters=_added_by(stages, index, "parameters")
            + _added_by(stages, index, "gradients") * is_copied,
            gradients=_added_by(with_gradients, index, "gradients") * (1 + is_stepped),
            optimizer=_added_by(stages, index, "optimizer") * (1 + is_copied),
            activations=activations_of(stage, peak.states[index]),
            buffers=stage.inputs * microbatches
            + holdings.messages[index].held(peak.states[index])
            + stage.gradient_copies * peak.states[index].has_all_gradients,
            workspace=workspace_of_action(stages, peak, allocator) if index == peak.stage else ZERO,
            kv_cache=stage.kv_cache,
        )
        for index, stage in sorted(stages.items())
    }


def memory_by_stage(plan: Plan, rank: int) -> dict[int, RankMemory]:
    """Return which part of the expected peak of a rank of `plan` belongs to each of its stages."""
    return stage_memory(
        plan.footprints(rank),
        peak_snapshots(plan.schedule.rows[rank], unread_gradients(plan.schedule)),
        microbatches=plan.schedule.microbatches,
        allocator=ALLOCATORS[plan.allocator],
    )


def memory_of_actions(plan: Plan, rank: int) -> Iterator[tuple[Snapshot, RankMemory]]:
    """Yield what a rank holds in each action; bounds are without what an allocator adds to it."""
    holdings = RankHoldings(plan.footprints(rank), plan.microbatches, ALLOCATORS[plan.allocator])
    unread = unread_gradients(plan.schedule)
    for snapshot in all_snapshots(plan.schedule.rows[rank], unread):
        yield snapshot, holdings.at(snapshot)


def fixed_bytes(plan: Plan, rank: int) -> int:
    """Return what the allocator and the communication library take on a rank, for any model."""
    return ALLOCATORS[plan.allocator].padded(0, 0, neighbour_ranks(plan.footprints(rank)))


def activation_curve(
    stages: Mapping[int, Footprint], row: Sequence[Action]
) -> Iterator[tuple[Action, Amount]]:
    """Yield each action of `row` with the activations that the rank holds after it.

    Outputs that are sent count until the backward.
    """
    for action, stage_states in states(row):
        yield action, summed(activations_of(stages[i], state) for i, state in stage_states.items())


def activation_changes(*, kept: Size, recomputed: Size, between: Size) -> dict[Kind, Size]:
    """Return what each action of a microbatch adds to the bytes that its stage holds of it.

    `kept` bytes live from the forward and `recomputed` ones from the recompute to the backward.
    `between` of them live from the input backward to the weight backward.
    """
    # With 3 kept, 38 recomputed and 43 between: F +3, recompute +38, I +2, W −43, together 0.
    # Without a split B takes back 41.
    return {
        Kind.FORWARD: kept,
        Kind.RECOMPUTE: recomputed,
        Kind.BACKWARD: -kept - recomputed,
        Kind.BACKWARD_INPUT: between - kept - recomputed,
        Kind.BACKWARD_WEIGHT: -between,
    }


# -- what a cap leaves


def backward_allowances(
    stages: Mapping[int, Footprint],
    index: int,
    memory_bytes: int,
    snapshots: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> Iterator[BackwardAllowance]:
    """Yield what a cap of `memory_bytes` leaves for stage `index`, at each of its backwards.

    It is what all else on the rank leaves, so a choice of recompute fits if its activations times
    `in_flight`, and its backward's peak, take no more.
    """
    stage = stages[index]
    # What regions do not change is looked at when the rank is: sums, and gathers before an action.
    changed = ("activations", *BACKWARD_PEAKS, "gathered", "backward_sum_peak")
    others = {**stages, index: msgspec.structs.replace(stage, **dict.fromkeys(changed, ZERO))}
    peers = neighbour_ranks(stages)
    holdings = RankHoldings(others, microbatches, allocator)
    for snapshot in snapshots:
        if snapshot.kind is Kind.BACKWARD and snapshot.stage == index:
            # For a cap of 100, of which the allocator takes 10 and all else on the rank 40, 50 are
            # left for, say, two microbatches in flight of 15 and a backward that needs 20.
            state, held = snapshot.states[index], holdings.at(snapshot)
            free = allocator.most_transient(memory_bytes, peers, held.persistent.bound)
            left = free - (held.total - held.persistent).bound - stage.gathered.bound
            has_gradients = 0 if stage.sums_in_backwards else state.has_gradients
            yield BackwardAllowance(state.with_activations, left, has_gradients)


def available_for_activations(
    stages: Mapping[int, Footprint],
    memory_bytes: int,
    *,
    microbatches: int,
    allocator: Allocator,
    recomputed: Collection[int] = (),
) -> int:
    """Return what a cap leaves for activations, whatever the order of actions; never too much.

    All else counts with the most that it may ever be: gradients exist, every message of the step
    has been received or waits for its end, and the largest workspace is in use. `recomputed` stages
    keep only outputs of a forward, and copies of buffers. The result is negative if no order fits.
    """
    persistent = _persistent(stages)
    always = counted_once(stages.values(), "gradients") + minibatch_of(stages, microbatches)
    step = always + optimizer_workspace(stages, allocator)
    if any(stage.is_validated_later for stage in stages.values()):
        copies = summed(counted_once(stages.values(), kind) for kind in ("gradients", "optimizer"))
        always += copies
        # The optimizer steps on copies of gradients.
        step += copies + counted_once(stages.values(), "gradients")
    always += summed(stage.gradient_copies for stage in stages.values())
    for index in stages:
        # A neighbour on the same rank sends nothing; what it hands over is added below.
        with_next = microbatches * (index + 1 not in stages)
        with_previous = microbatches * (index - 1 not in stages)
        all_messages = StageState(
            values_received=with_previous,
            gradients_received=with_next,
            backward_sent=with_previous,
        )
        always += StageMessages(stages, index).held(all_messages)
    for index, stage in stages.items():
        if index + 1 in stages:
            behind = stages[index + 1]
            goes_on = index + 2 in stages
            always += most_handed_over(stage, behind, goes_on=goes_on) * microbatches
    free = allocator.most_transient(memory_bytes, neighbour_ranks(stages), persistent.bound)
    workspace = max(most_in_actions(stages, index, index in recomputed) for index in stages)
    left = free - always.bound - workspace
    # The optimizer's step comes after all backwards: nothing is in flight, but its workspace is.
    return left if step.bound <= free else min(left, free - step.bound)


def most_for_activations(
    stages: Mapping[int, Footprint], memory_bytes: int, *, microbatches: int, allocator: Allocator
) -> int:
    """Return what activations can take at most in any order that fits a cap; at least 0."""
    # No gradients: before the first backward there are none, and activations can have their room.
    persistent = _persistent(stages).bound
    free = allocator.most_transient(memory_bytes, neighbour_ranks(stages), persistent)
    return max(0, free - minibatch_of(stages, microbatches).bound)


# -- parts


def _added_by(stages: Mapping[int, Footprint], index: int, kind: str) -> Amount:
    """Return what stage `index` adds to the stages before it."""
    before = [stage for other, stage in stages.items() if other < index]
    up_to = [stage for other, stage in stages.items() if other <= index]
    return counted_once(up_to, kind) - counted_once(before, kind)


def _padded(memory: RankMemory, allocator: Allocator, peers: int) -> int:
    """Return the bound of a rank that holds this, with what its allocator adds."""
    persistent = memory.persistent.bound
    return allocator.padded(persistent, memory.total.bound - persistent, peers)


def _persistent(stages: Mapping[int, Footprint]) -> Amount:
    """Return what stays on a rank from the first step on."""
    kinds = ("parameters", "optimizer")
    held = summed(counted_once(stages.values(), kind) for kind in kinds)
    return held + kv_cache_of(stages)


def neighbour_ranks(stages: Mapping[int, Footprint]) -> int:
    """Return with how many other ranks these stages exchange tensors: a rank for each neighbouring
    stage, and replicas.
    """
    before = {index - 1 for index in stages if index} - set(stages)
    behind = {index + 1 for index, stage in stages.items() if stage.outputs.bound} - set(stages)
    return len(before | behind) + max(stage.replica_peers for stage in stages.values())
