"""In which state each stage's microbatches are while a rank runs its row of actions.

Everything that is held begins with one action and ends with another. For a stage of one rank, with
one microbatch and a split backward:

    row                RECV_F   F   RECV_B   I        W        I of a later microbatch
    activations                 ├────────────┤
    between                                  ├────────┤
    sent by I                                ├─────────────────┤
    received values    ├─────────────────────┤
    received gradients              ├────────┤

The backward of a microbatch says that its outputs were received, and a later backward that what an
earlier one has sent was read (unread_gradients.py). These spans, added up over microbatches, are
the state after each action. holdings.py multiplies the counts with a stage's `Footprint`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind
from pipecompile.memory_model.unread_gradients import UnreadGradients

__all__ = [
    "ALL_UNREAD",
    "HandoverState",
    "LastAction",
    "Snapshot",
    "StageState",
    "all_snapshots",
    "states",
]

LastAction = Literal["forward", "input backward", "weight backward", "backward", "returned"]
"""How far a microbatch is in a stage: the last action that it has done there, or "returned" once
the rank of the stage before has read its gradients.
"""


class HandoverState(NamedTuple):
    """How far a microbatch is in two stages of one rank that hand storages to each other.

    `is_recomputed` says that the stage before recomputes it.
    """

    before: LastAction
    behind: LastAction
    is_recomputed: bool


ALL_UNREAD: UnreadGradients = MappingProxyType({})
NO_HANDOVERS: Mapping[HandoverState, int] = MappingProxyType({})


class StageState(NamedTuple):
    """How many microbatches of one stage are in which state.

    with_activations    forward (or recompute) done, backward not begun
    with_outputs        only outputs are held, of a forward that will be recomputed
    with_buffer_copies  copies of buffers are held for a recompute
    between_backwards   input backward done, weight backward not; outputs that the latter does not
                        need are gone
    between_returned    the same, and the input gradients were read; those that the weight backward
                        needs are held
    backward_sent       input gradients of a backward went to another rank, and may be unread
    input_backward_sent   those of an input backward
    values_received     values were received, and the backward (or input backward) has not begun
    values_between      the same between input and weight backward: what the latter needs is held
    values_relayed      in an evaluation: values that were sent on as they came wait for its end
    gradients_received, gradients_between   the same of received gradients
    gradients_relayed   gradients that were sent on as they came may be unread
    has_gradients       1 if the gradients of parameters exist
    has_all_gradients   1 if they are complete, so that replicas sum them
    handovers           if the next stage is on the same rank: how far microbatches are in both,
                        as soon as there are gradients between them
    """

    with_activations: int = 0
    with_outputs: int = 0
    with_buffer_copies: int = 0
    between_backwards: int = 0
    between_returned: int = 0
    backward_sent: int = 0
    input_backward_sent: int = 0
    values_received: int = 0
    values_between: int = 0
    values_relayed: int = 0
    gradients_received: int = 0
    gradients_between: int = 0
    gradients_relayed: int = 0
    has_gradients: int = 0
    has_all_gradients: int = 0
    handovers: Mapping[HandoverState, int] = NO_HANDOVERS

    @property
    def in_flight(self) -> int:
        """The number of microbatches that hold activations."""
        return self.with_activations + self.between_backwards


class Snapshot(NamedTuple):
    """The state of each stage of a rank when an action of `kind` begins in `stage`.

    The sum over replicas of a stage's gradients is one of kind REDUCE. The optimizer's step is one
    for all stages, of kind STEP; its `stage` is the first one.
    `frees_outputs` says that a weight backward frees those outputs that it needs: the stage behind
    holds no storages of the same forward.
    """

    kind: Kind
    stage: int
    states: Mapping[int, StageState]
    frees_outputs: bool = False

    @property
    def is_before_backwards(self) -> bool:
        """Whether no backward of the step has begun on this rank."""
        between = (state.in_flight - state.with_activations for state in self.states.values())
        has_gradients = any(state.has_gradients for state in self.states.values())
        return not has_gradients and not any(between)


class _Span(NamedTuple):
    """A field of a stage's state is one higher after action `begin` until `end` is done."""

    stage: int
    field: str | HandoverState
    begin: int
    end: int


_KINDS = (
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_BACKWARD,
)


_RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})


class _ActionIndices(NamedTuple):
    """Where in a row the actions of one microbatch in one stage are, in the order of `_KINDS`.

    An action that the row does not have is behind the row's end. `gradients_read` is where the
    message of its input gradients is freed.
    """

    forward: int
    recompute: int
    backward: int
    input_backward: int
    weight_backward: int
    receive_values: int
    receive_gradients: int
    gradients_read: int

    @property
    def input_gradients(self) -> int:
        """Where the gradients of inputs are made."""
        return min(self.backward, self.input_backward)

    @property
    def weight_gradients(self) -> int:
        """Where the gradients of parameters are made."""
        return min(self.backward, self.weight_backward)

    def last_action(self, index: int) -> LastAction:
        """Return how far the microbatch is after the action at `index`."""
        if index >= max(self.gradients_read, self.weight_gradients):
            return "returned"
        if index >= self.backward:
            return "backward"
        if index < self.input_backward:
            return "forward"
        return "input backward" if index < self.weight_backward else "weight backward"


def _with_receives(row: Sequence[Action]) -> Sequence[Action]:
    """Return the row itself if it has RECV actions, else with all of them at its beginning."""
    if any(action.kind in _RECEIVES for action in row):
        return row
    # As if all messages came before the first action: in no order of receives is more held.
    stages, trains = _stages(row), _trains(row)
    forwards = [action for action in row if action.kind is Kind.FORWARD]
    values = [a._replace(kind=Kind.RECEIVE_FORWARD) for a in forwards if a.stage - 1 not in stages]
    gradients = [
        action._replace(kind=Kind.RECEIVE_BACKWARD)
        for action in forwards
        if trains and action.stage + 1 not in stages
    ]
    return [*values, *gradients, *row]


def _trains(row: Sequence[Action]) -> bool:
    return any(action.kind in BACKWARDS for action in row)


def all_snapshots(
    row: Sequence[Action], unread: UnreadGradients = ALL_UNREAD
) -> Iterator[Snapshot]:
    """Yield a snapshot for every action that computes, one for each sum over replicas, and one for
    the optimizer's step. So many gradients are `unread` as one is sent; if none is named, all are.
    """
    row = _with_receives(row)
    before: Mapping[int, StageState] = {stage: StageState() for stage in _stages(row)}
    for action, after in states(row, unread):
        if action.kind in COMPUTE:
            yield _snapshot(action, before, after[action.stage])
        if after[action.stage].has_all_gradients > before[action.stage].has_all_gradients:
            yield Snapshot(Kind.REDUCE, action.stage, after)
        before = after
    if _trains(row):
        # Replicas have summed: copies of gradients are gone.
        done = {stage: StageState(has_gradients=1) for stage in before}
        yield Snapshot(Kind.STEP, min(before), done)


def _snapshot(action: Action, before: Mapping[int, StageState], after: StageState) -> Snapshot:
    """Return the snapshot as `action` begins; its stage is in the state `after` when it is done."""
    own = before[action.stage]
    # Each microbatch is in one state of a handover. The count that falls is that of the state which
    # the microbatch of this action leaves.
    ended = (
        handover
        for handover, count in own.handovers.items()
        if after.handovers.get(handover, 0) < count
    )
    # A forward begins with the copies of buffers that its recompute will need.
    copies = max(own.with_buffer_copies, after.with_buffer_copies)
    beginning = {**before, action.stage: own._replace(with_buffer_copies=copies)}
    frees_outputs = (
        action.kind is Kind.BACKWARD_WEIGHT
        and after.between_backwards < own.between_backwards
        and all(handover.is_recomputed for handover in ended)
    )
    return Snapshot(action.kind, action.stage, beginning, frees_outputs)


def states(
    row: Sequence[Action], unread: UnreadGradients = ALL_UNREAD
) -> Iterator[tuple[Action, Mapping[int, StageState]]]:
    """Yield each action with the state of each stage after it.

    So many gradients are `unread` as one is sent; if none is named, all are.
    """
    # By index of the row and by stage: how much each field changes there. A field with the spans
    # 1‥4 and 2‥4 changes by +1 +1 −2 at 1, 2 and 4, so after actions 0 … 4 it is 0 1 2 2 0. What
    # ends at the row's end is never taken off: no action is there.
    changes: dict[int, dict[int, Counter[str | HandoverState]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    for stage, field, begin, end in _spans(row, unread):
        changes[begin][stage][field] += 1
        changes[end][stage][field] -= 1
    current = {stage: StageState() for stage in _stages(row)}
    for index, action in enumerate(row):
        changed = {
            stage: _changed(current[stage], counts) for stage, counts in changes[index].items()
        }
        current = {**current, **changed}
        yield action, current


def _changed(state: StageState, changes: Mapping[str | HandoverState, int]) -> StageState:
    """Return the state with these changes of its counts."""
    counts, handovers = dict[str, int](), dict[HandoverState, int]()
    for field, change in changes.items():
        if isinstance(field, str):
            counts[field] = getattr(state, field) + change
        else:
            handovers[field] = state.handovers.get(field, 0) + change
    current = state.handovers
    if handovers:
        every = {**current, **handovers}
        current = {handover: count for handover, count in every.items() if count}
    return state._replace(**counts, handovers=current)


def _stages(row: Sequence[Action]) -> list[int]:
    return sorted({action.stage for action in row})


def _spans(row: Sequence[Action], unread: UnreadGradients) -> Iterator[_Span]:
    """Yield everything that is held while the row runs."""
    end, trains = len(row), _trains(row)
    index_of = {
        (action.stage, action.microbatch, action.kind): index for index, action in enumerate(row)
    }
    read_at = _read_at(row, unread)
    places = {
        (stage, microbatch): [index_of.get((stage, microbatch, kind), end) for kind in _KINDS]
        for stage, microbatch, kind in index_of
        if kind in COMPUTE
    }
    indices = {
        key: _ActionIndices(*[*found, read_at.get(key, end)]) for key, found in places.items()
    }
    # A neighbour on another rank has no actions in this row.
    absent = _ActionIndices(*[end] * (len(_KINDS) + 1))
    for (stage, microbatch), own in indices.items():
        before = indices.get((stage - 1, microbatch), absent)
        behind = indices.get((stage + 1, microbatch), absent)
        for field, begin, stop in _microbatch_spans(own, before, behind, end, trains):
            # What an action begins that the row does not have, such as an input backward where
            # backwards are whole, begins at the row's end and is empty.
            if begin < stop:
                yield _Span(stage, field, begin, stop)
    if trains:
        for stage in _stages(row):
            made = [own.weight_gradients for (index, _), own in indices.items() if index == stage]
            yield _Span(stage, "has_gradients", min(made), end)
            yield _Span(stage, "has_all_gradients", max(made), end)


def _read_at(row: Sequence[Action], unread: UnreadGradients) -> dict[tuple[int, int | None], int]:
    """Return by stage and microbatch where a stage frees the message of its input gradients: as it
    sends a later one that says so.
    """
    # If 1, 2 and 2 are unread as the gradients of 0, 1 and 2 are sent, then the message of 0 was
    # read when that of 2 is sent: only those of 1 and 2 may wait.
    sent: dict[int, deque[int | None]] = defaultdict(deque)
    read_at: dict[tuple[int, int | None], int] = {}
    for index, (kind, stage, microbatch) in enumerate((a.kind, a.stage, a.microbatch) for a in row):
        if kind in BACKWARDS and (stage, microbatch) in unread:
            sent[stage].append(microbatch)
            while len(sent[stage]) > unread[stage, microbatch]:
                read_at[stage, sent[stage].popleft()] = index
    return read_at


def _microbatch_spans(
    own: _ActionIndices, before: _ActionIndices, behind: _ActionIndices, end: int, trains: bool
) -> Iterator[tuple[str | HandoverState, int, int]]:
    """Yield field, begin and end of what a stage holds of one microbatch.

    `before` and `behind` are the neighbouring stages, if they are on the same rank; else they have
    no actions. The row ends at `end`.
    """
    is_recomputed = own.recompute < end
    follows_neighbour, hands_over = before.input_gradients < end, behind.input_gradients < end
    if is_recomputed or not trains:
        yield "with_outputs", own.forward, own.input_gradients
    if is_recomputed:
        yield "with_buffer_copies", own.forward, own.weight_gradients
    if trains:
        begin = own.recompute if is_recomputed else own.forward
        yield "with_activations", begin, own.input_gradients
    yield "between_backwards", own.input_backward, own.weight_backward
    if hands_over:
        # The state of a handover changes with each backward of either stage.
        ends = {behind.input_gradients, behind.weight_gradients, own.gradients_read}
        ends |= {own.input_gradients, own.weight_gradients, end}
        for begin, stop in pairwise(sorted(ends)):
            last = own.last_action(begin), behind.last_action(begin)
            yield HandoverState(*last, is_recomputed), begin, stop
    if not follows_neighbour:
        yield "input_backward_sent", own.input_backward, own.gradients_read
        yield "backward_sent", own.backward, own.gradients_read
        if own.input_backward < end:
            yield "between_returned", own.gradients_read, own.weight_backward
    if own.receive_values < end:
        # An evaluation lets go of what it received when its forward is done.
        done = own.input_gradients if trains else own.forward
        yield "values_received", own.receive_values, done
        if not hands_over:
            yield "values_between", own.input_backward, own.weight_backward
            yield "values_relayed", end if trains else done, end
    if own.receive_gradients < end:
        yield "gradients_received", own.receive_gradients, own.input_gradients
        if not follows_neighbour:
            yield "gradients_between", own.input_backward, own.weight_backward
            yield "gradients_relayed", own.input_gradients, own.gradients_read
