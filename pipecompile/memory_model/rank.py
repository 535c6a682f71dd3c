"""The one memory model: (what stages hold, order of actions) → bytes by kind, at the moment when most is held.

holding.py says what a stage holds for a microbatch, and the most that lives while it computes. Here a rank's row of
actions says how often, at each moment:

    parameters    with buffers                           always
    optimizer     its state                              always
    gradients     of parameters                          from the first backward of a stage on
    activations   what microbatches in flight keep       from the forward to the backward
    buffers       the minibatch where it is read, a      always, those of all microbatches
                  receive buffer for each message, and
                  what was sent                          until the step ends
    workspace     the most that lives in the action      while it runs

That is what torch.distributed.pipelining does: it makes all receive buffers in the first step, and lets go of what it
has sent when the step ends. A peak is that of one moment: kinds that peak at other moments are not added up.

Each figure comes twice. `expected` counts the bytes asked for. `bound` is what an allocator may take for them, see
allocator.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.footprint import Footprint, size_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Action, Kind
from pipecompile.memory_model.allocator import ALLOCATORS, Allocator
from pipecompile.memory_model.handover import handed_over, most_handed_over
from pipecompile.memory_model.snapshots import StageState, Snapshot, peak_snapshots, states

__all__ = [
    "BackwardAllowance",
    "activation_curve",
    "stage_memory",
    "most_for_activations",
    "activation_changes",
    "fixed_bytes",
    "memory_by_stage",
    "rank_memory",
    "available_for_activations",
    "backward_allowances",
]

Size = TypeVar("Size", int, Amount)
BACKWARD_PEAKS = ("first_backward_peak", "backward_peak")


class BackwardAllowance(NamedTuple):
    """What microbatches of a stage may take when a backward of it begins with so many `in_flight`, itself included.

    `summed` tells whether the gradients of parameters are there, which then do not count.
    """

    in_flight: int
    bytes: int
    summed: int


def rank_memory(
    stages: Mapping[int, Footprint],
    at: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> RankMemory:
    """The peak of a rank that holds `stages` (by index) and goes through these moments."""
    candidates = [_held(stages, moment, microbatches, allocator) for moment in at]
    expected = max(candidates, key=lambda memory: memory.total.expected)
    bound = max(candidates, key=lambda memory: memory.total.bound)
    size = bound.total.bound
    margin = allocator.padded(size, _peers(stages)) - size
    kinds = {
        kind: Amount(expected=getattr(expected, kind).expected, bound=getattr(bound, kind).bound)
        for kind in RankMemory.__struct_fields__
    }
    return RankMemory(
        **{**kinds, "workspace": kinds["workspace"] + Amount(expected=0, bound=margin)}
    )


def stage_memory(
    stages: Mapping[int, Footprint],
    at: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> dict[int, RankMemory]:
    """What of the peak that is expected of a rank is of each of its stages.

    A parameter that several read is of the first. Scratch is of the stage that acts; bounds are without what an
    allocator adds to the whole.
    """
    moment = max(
        at, key=lambda moment: _held(stages, moment, microbatches, allocator).total.expected
    )
    summed = {index: stage for index, stage in stages.items() if moment.held[index].summed}
    return {
        index: RankMemory(
            parameters=_more(stages, index, "parameters"),
            gradients=_more(summed, index, "gradients"),
            optimizer=_more(stages, index, "optimizer"),
            activations=_activations(stage, moment.held[index]),
            buffers=_arriving(stages, index) * microbatches
            + _waiting(stages, index, moment.held[index]),
            workspace=_working(stages, moment, allocator) if index == moment.stage else ZERO,
        )
        for index, stage in sorted(stages.items())
    }


def memory_by_stage(plan: Plan, rank: int) -> dict[int, RankMemory]:
    """What of the expected peak of a rank of `plan` belongs to each of its stages."""
    return stage_memory(
        plan.footprints(rank),
        peak_snapshots(plan.schedule.rows[rank]),
        microbatches=plan.schedule.microbatches,
        allocator=ALLOCATORS[plan.allocator],
    )


def fixed_bytes(plan: Plan, rank: int) -> int:
    """Return what the allocator and the communication library take on a rank, whatever the model is."""
    return ALLOCATORS[plan.allocator].padded(0, _peers(plan.footprints(rank)))


def _more(stages: Mapping[int, Footprint], index: int, kind: str) -> Amount:
    """What stage `index` has besides those before it."""
    before, after = (
        [s for other, s in stages.items() if other < end] for end in (index, index + 1)
    )
    return _once(after, kind) - _once(before, kind)


def _held(
    stages: Mapping[int, Footprint], moment: Snapshot, microbatches: int, allocator: Allocator
) -> RankMemory:
    """By kind what is held at a moment, with the most that lives in its action."""
    pairs = [(stage, moment.held[index]) for index, stage in sorted(stages.items())]
    return RankMemory(
        parameters=_once(stages.values(), "parameters"),
        gradients=_once([stage for stage, held in pairs if held.summed], "gradients"),
        optimizer=_once(stages.values(), "optimizer"),
        activations=_sum(_activations(stage, held) for stage, held in pairs),
        buffers=_buffers(stages) * microbatches
        + _sum(_waiting(stages, index, held) for index, held in moment.held.items()),
        workspace=_working(stages, moment, allocator),
    )


def _sum(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, ZERO)


def _once(stages: Collection[Footprint], kind: str) -> Amount:
    """Of all these stages of a rank: what several read is there once."""
    shared = {share.name: getattr(share, kind) for stage in stages for share in stage.shared}
    counted = _sum(getattr(share, kind) for stage in stages for share in stage.shared)
    return _sum(getattr(stage, kind) for stage in stages) - counted + _sum(shared.values())


def _always(stages: Mapping[int, Footprint], microbatches: int, *kinds: str) -> Amount:
    """What a rank holds all the time, of these kinds, with its buffers."""
    return _sum(_once(stages.values(), kind) for kind in kinds) + _buffers(stages) * microbatches


def _activations(stage: Footprint, held: StageState) -> Amount:
    half = stage.activations + stage.added_by_input_backward - stage.freed_by_input_backward
    halved = half * held.halved + (half - stage.outputs_freed_by_input_backward) * held.stripped
    return (
        stage.activations * held.kept
        + stage.outputs * held.bare
        + stage.buffer_copies * held.copied
        + halved
    )


def _buffers(stages: Mapping[int, Footprint]) -> Amount:
    """What arrives for one microbatch: from the minibatch, and from other ranks."""
    return _sum(_arriving(stages, index) for index in stages)


def _arriving(stages: Mapping[int, Footprint], index: int) -> Amount:
    stage = stages[index]
    values = stage.received if index - 1 not in stages else ZERO
    return stage.inputs + values + (stage.received_gradients if index + 1 not in stages else ZERO)


def _waiting(stages: Mapping[int, Footprint], index: int, held: StageState) -> Amount:
    """What was sent to other ranks, and what the next stage is handed over on the same one."""
    stage = stages[index]
    sent = (
        stage.outputs * held.sent
        + size_of(stage.sent_by_backward) * held.returned
        + size_of(stage.sent_by_input_backward) * held.passed
    )
    return sent + _sum(
        handed_over(stage, stages[index + 1], turn) * count for turn, count in held.turns.items()
    )


def _working(stages: Mapping[int, Footprint], moment: Snapshot, allocator: Allocator) -> Amount:
    """The most that lives in the action, above what is held."""
    stage, summed = stages[moment.stage], moment.held[moment.stage].summed
    match moment.kind:
        case Kind.FORWARD | Kind.RECOMPUTE:
            return stage.forward_peak
        case Kind.BACKWARD:
            return stage.backward_peak if summed else stage.first_backward_peak
        case Kind.BACKWARD_INPUT:
            return stage.input_backward_peak
        case Kind.BACKWARD_WEIGHT if moment.stripped:
            return (
                stage.weight_backward_peak_freeing_outputs
                if summed
                else stage.first_weight_backward_peak_freeing_outputs
            )
        case Kind.BACKWARD_WEIGHT:
            return stage.weight_backward_peak if summed else stage.first_weight_backward_peak
    return _scratch(stages, allocator)


def _peers(stages: Mapping[int, Footprint]) -> int:
    """How many stages of other ranks these exchange tensors with."""
    before = {index - 1 for index in stages if index} - set(stages)
    after = {index + 1 for index, stage in stages.items() if stage.outputs.bound} - set(stages)
    return len(before | after)


def backward_allowances(
    stages: Mapping[int, Footprint],
    index: int,
    memory_bytes: int,
    at: Sequence[Snapshot],
    *,
    microbatches: int,
    allocator: Allocator,
) -> Iterator[BackwardAllowance]:
    """What is left for what stage `index` keeps of microbatches, and for what lives in its backward, by moment."""
    bare = {
        **stages,
        index: msgspec.structs.replace(
            stages[index], activations=ZERO, **dict.fromkeys(BACKWARD_PEAKS, ZERO)
        ),
    }
    free = allocator.unpadded(memory_bytes, _peers(stages))
    for moment in at:
        if moment.kind is Kind.BACKWARD and moment.stage == index:
            held = moment.held[index]
            rest = _held(bare, moment, microbatches, allocator).total.bound
            yield BackwardAllowance(held.kept, free - rest, held.summed)


def available_for_activations(
    stages: Mapping[int, Footprint],
    memory_bytes: int,
    *,
    microbatches: int,
    allocator: Allocator,
    recomputed: Collection[int] = (),
) -> int:
    """What `memory_bytes` leave for what microbatches keep, whatever the order of actions; never too much.

    `recomputed` stages keep only outputs of a forward, and copies that are there before. Negative if no order fits.
    """
    always = _always(stages, microbatches, "parameters", "gradients", "optimizer")
    step = always + _scratch(stages, allocator)
    for index in stages:
        done = StageState(
            sent=microbatches * (index + 1 not in stages),
            returned=microbatches * (index - 1 not in stages),
        )
        always += _waiting(stages, index, done)
    pairs = [(stage, stages[index + 1]) for index, stage in stages.items() if index + 1 in stages]
    always += _sum(most_handed_over(before, behind) for before, behind in pairs) * microbatches
    free = allocator.unpadded(memory_bytes, _peers(stages))
    left = (
        free
        - always.bound
        - max(_most_above(stages, index, index in recomputed) for index in stages)
    )
    return left if step.bound <= free else min(left, free - step.bound)


def most_for_activations(
    stages: Mapping[int, Footprint], memory_bytes: int, *, microbatches: int, allocator: Allocator
) -> int:
    """What kept activations can take at the most in any order that fits `memory_bytes`; at least 0."""
    always = _always(stages, microbatches, "parameters", "optimizer")
    return max(0, allocator.unpadded(memory_bytes, _peers(stages)) - always.bound)


def _most_above(stages: Mapping[int, Footprint], index: int, recomputed: bool) -> int:
    """The most that lives in an action of a stage, above what is kept when it ends (a forward) or begins."""
    stage = stages[index]
    forward = stage.forward_peak.bound - (stage.outputs if recomputed else stage.activations).bound
    return max(
        forward,
        stage.backward_peak.bound,
        stage.input_backward_peak.bound,
        stage.weight_backward_peak.bound,
        _making(stages, index),
    )


def _making(stages: Mapping[int, Footprint], index: int) -> int:
    """The most while a stage makes gradients, above these: but what another of the rank has too is there twice."""
    stage, others = stages[index], (other for number, other in stages.items() if number != index)
    names = {share.name for other in others for share in other.shared}
    own = stage.gradients.bound - sum(
        share.gradients.bound for share in stage.shared if share.name in names
    )
    return max(stage.first_backward_peak.bound, stage.first_weight_backward_peak.bound) - own


def _scratch(stages: Mapping[int, Footprint], allocator: Allocator) -> Amount:
    """Of the optimizer's step: of all stages at once, or of one after another."""
    scratch = [stage.optimizer_scratch for stage in stages.values()]
    return (
        _sum(scratch)
        if allocator.steps_over_lists
        else max(scratch, key=lambda amount: amount.bound)
    )


def activation_changes(*, kept: Size, recomputed: Size, between: Size) -> dict[Kind, Size]:
    """What each action of a microbatch adds to the bytes its stage holds of it.

    `kept` from the forward on and `recomputed` from the recompute on, until the backward; `between` of them stay from
    the gradients of the inputs to those of the weights.
    """
    return {
        Kind.FORWARD: kept,
        Kind.RECOMPUTE: recomputed,
        Kind.BACKWARD: -kept - recomputed,
        Kind.BACKWARD_INPUT: between - kept - recomputed,
        Kind.BACKWARD_WEIGHT: -between,
    }


def activation_curve(
    stages: Mapping[int, Footprint], row: Sequence[Action]
) -> Iterator[tuple[Action, Amount]]:
    """After each action of `row`, the activations that the rank holds; those that are sent count until the backward."""
    for action, held in states(row):
        yield action, _sum(_activations(stages[index], counts) for index, counts in held.items())
