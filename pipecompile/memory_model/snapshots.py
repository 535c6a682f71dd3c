"""In which state each stage's microbatches are while a rank's row of actions runs. Part of the memory model, memory.py.

What is held begins with an action and ends with another; these spans, added up, are the state after each action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind

__all__ = ["StageState", "Snapshot", "Phase", "HandoverPhase", "moments", "states"]

Phase = Literal["forward", "half", "halves", "whole"]
"""How far a microbatch is in a stage: before its backward, between its halves, after both, or after a whole one."""


class HandoverPhase(NamedTuple):
    """How far a microbatch is in two stages of one rank, one after the other; if `again`, the first recomputes it."""

    before: Phase
    behind: Phase
    again: bool


NO_TURNS: Mapping[HandoverPhase, int] = MappingProxyType({})


class StageState(NamedTuple):
    """How many microbatches of one stage are in which state.

    `kept`: forward (or recompute) done, backward not begun. `bare`: outputs of a forward that is recomputed. `copied`:
    buffers for its recompute. `halved`: between the halves of a backward; `stripped`: so, without outputs that the
    second half does not need, since they were computed again, or as the next stage is on the same rank. `sent`,
    `returned`, `passed`: outputs, and gradients of inputs by a whole backward or a first half, that went to other ranks
    and wait for the step's end. `summed`: whether the gradients of parameters are there. `turns`: if the next stage is
    on the same rank, how far they are in both, once there are gradients between these.
    """

    kept: int = 0
    bare: int = 0
    copied: int = 0
    halved: int = 0
    stripped: int = 0
    sent: int = 0
    returned: int = 0
    passed: int = 0
    summed: int = 0
    turns: Mapping[HandoverPhase, int] = NO_TURNS


class Snapshot(NamedTuple):
    """What a rank holds by stage when an action of this kind begins; STEP is the optimizer's, of all stages.

    The microbatch of a second half may be `stripped`, as in `Held`: but not of outputs that it hands over.
    """

    kind: Kind
    stage: int
    held: Mapping[int, StageState]
    stripped: bool = False


class _Span(NamedTuple):
    """One more of this kind in a stage, after the action at index `begin` until that at `end` is done."""

    stage: int
    kind: str | HandoverPhase
    begin: int
    end: int


ORDER = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class _Times(NamedTuple):
    """At which index of a row each action of one microbatch in one stage is, in `ORDER`; behind the last if nowhere."""

    forward: int
    recompute: int
    whole: int
    first: int
    second: int

    @property
    def back(self) -> int:
        """When there are the gradients of inputs."""
        return min(self.whole, self.first)

    @property
    def end(self) -> int:
        """When there are those of parameters."""
        return min(self.whole, self.second)

    def phase(self, index: int) -> Phase:
        """How far it is after the action at this index."""
        if index >= self.whole:
            return "whole"
        if index < self.first:
            return "forward"
        return "half" if index < self.second else "halves"


def peak_snapshots(row: Sequence[Action]) -> tuple[Snapshot, ...]:
    """The moments of a rank's row at which it may hold most: of two alike, the one that holds no more is left out."""
    found: dict[tuple[object, ...], list[Snapshot]] = {}
    for moment in _all_moments(row):
        key = (
            moment.kind,
            moment.stage,
            moment.held[moment.stage].summed,
            moment.stripped,
        )
        rivals = found.setdefault(key, [])
        if not any(_covers(other, moment) for other in rivals):
            rivals[:] = [other for other in rivals if not _covers(moment, other)] + [moment]
    return tuple(moment for rivals in found.values() for moment in rivals)


def _covers(left: Snapshot, right: Snapshot) -> bool:
    pairs = zip(left.held.values(), right.held.values(), strict=True)
    return all(_is_more(ours, theirs) for ours, theirs in pairs)


def _is_more(left: StageState, right: StageState) -> bool:
    """Whether it is at least as much of every kind."""
    *ours, our_turns = left
    *theirs, their_turns = right
    turns = all(our_turns.get(turn, 0) >= count for turn, count in their_turns.items())
    return turns and all(a >= b for a, b in zip(ours, theirs, strict=True))


def _all_moments(row: Sequence[Action]) -> Iterator[Snapshot]:
    before: Mapping[int, StageState] = {stage: StageState() for stage in _stages(row)}
    for action, held in states(row):
        if action.kind in COMPUTE:
            own, after = before[action.stage], held[action.stage]
            copied = max(own.copied, after.copied)  # a forward begins with its copies
            now = {**before, action.stage: own._replace(copied=copied)}
            is_second = action.kind is Kind.BACKWARD_WEIGHT
            left = (turn for turn, count in own.turns.items() if after.turns.get(turn, 0) < count)
            strips = after.stripped < own.stripped and all(turn.again for turn in left)
            yield Snapshot(action.kind, action.stage, now, is_second and strips)
        before = held
    if any(action.kind in BACKWARDS for action in row):
        yield Snapshot(Kind.STEP, min(before), {stage: StageState(summed=1) for stage in before})


def states(row: Sequence[Action]) -> Iterator[tuple[Action, Mapping[int, StageState]]]:
    """Each action with what is held after it, by stage."""
    changes: dict[int, dict[int, Counter[str | HandoverPhase]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    for stage, kind, begin, end in _spans(row):
        changes[begin][stage][kind] += 1
        changes[end][stage][kind] -= 1
    held = {stage: StageState() for stage in _stages(row)}
    for index, action in enumerate(row):
        held = {
            **held,
            **{stage: _changed(held[stage], counts) for stage, counts in changes[index].items()},
        }
        yield action, held


def _changed(held: StageState, changes: Mapping[str | HandoverPhase, int]) -> StageState:
    counts = {
        kind: getattr(held, kind) + change
        for kind, change in changes.items()
        if isinstance(kind, str)
    }
    turns = {
        kind: held.turns.get(kind, 0) + change
        for kind, change in changes.items()
        if isinstance(kind, HandoverPhase)
    }
    left = (
        {turn: count for turn, count in {**held.turns, **turns}.items() if count}
        if turns
        else held.turns
    )
    return held._replace(**counts, turns=left)


def _stages(row: Sequence[Action]) -> list[int]:
    return sorted({action.stage for action in row})


def _spans(row: Sequence[Action]) -> Iterator[_Span]:
    never, trains = len(row), any(action.kind in BACKWARDS for action in row)
    when = {
        (action.stage, action.microbatch, action.kind): index for index, action in enumerate(row)
    }
    times = {
        (stage, microbatch): _Times(*(when.get((stage, microbatch, kind), never) for kind in ORDER))
        for stage, microbatch, kind in when
        if kind in COMPUTE
    }
    absent = _Times(*[never] * len(ORDER))
    for (stage, microbatch), own in times.items():
        before, behind = (times.get((stage + step, microbatch), absent) for step in (-1, 1))
        for kind, begin, end in _of_microbatch(own, before, behind, never, trains):
            if begin < end:
                yield _Span(stage, kind, begin, end)
    for stage in _stages(row) if trains else []:
        yield _Span(
            stage,
            "summed",
            min(own.end for (index, _), own in times.items() if index == stage),
            never,
        )


def _of_microbatch(
    own: _Times, before: _Times, behind: _Times, never: int, trains: bool
) -> Iterator[tuple[str | HandoverPhase, int, int]]:
    """Kind, begin and end, where these differ. `before` and `behind` are the stages beside it, if on the same rank."""
    is_again, takes, hands_over = own.recompute < never, before.back < never, behind.back < never
    if is_again or not trains:
        yield "bare", own.forward, own.back if hands_over else own.end
    if is_again:
        yield "copied", own.forward, own.end
    if trains:
        yield "kept", own.recompute if is_again else own.forward, own.back
    yield "stripped" if is_again or hands_over else "halved", own.first, own.second
    if hands_over:
        for begin, end in pairwise(sorted({behind.back, behind.end, own.back, own.end, never})):
            yield HandoverPhase(own.phase(begin), behind.phase(begin), is_again), begin, end
    else:
        yield "sent", own.end, never
    if not takes:
        yield "passed", own.first, never
        yield "returned", own.whole, never
