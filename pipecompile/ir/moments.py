"""In which state each stage's microbatches are while a rank's row of actions runs. Part of the memory model, memory.py.

What is held begins with an action and ends with another; these spans, added up, are the state after each action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind

__all__ = ["Held", "Moment", "moments", "states"]


class Held(NamedTuple):
    """How many microbatches of one stage are in which state.

    `kept`: forward (or recompute) done, backward not begun. `bare`: outputs of a forward that is recomputed. `copied`:
    buffers for its recompute. `halved`: between the halves of a backward; `stripped`: so, without outputs, which were
    computed again, or of which the next stage, on the same rank, is done. `sent`, `returned`, `passed`: outputs, and
    gradients of inputs by a whole backward or a first half, that wait for the step's end. `lent`: between the halves,
    and what was passed on is no longer needed by the stage before, of the same rank. `summed`: whether the gradients of
    parameters are there.
    """

    kept: int = 0
    bare: int = 0
    copied: int = 0
    halved: int = 0
    stripped: int = 0
    sent: int = 0
    returned: int = 0
    passed: int = 0
    lent: int = 0
    summed: int = 0


class Moment(NamedTuple):
    """What a rank holds by stage when an action of this kind begins; STEP is the optimizer's, of all stages.

    The microbatch of a second half may be `stripped`, as in `Held`.
    """

    kind: Kind
    stage: int
    held: Mapping[int, Held]
    stripped: bool = False


class _Span(NamedTuple):
    """One more of this kind in a stage, after the action at index `begin` until that at `end` is done."""

    stage: int
    kind: str
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


def moments(row: Sequence[Action]) -> tuple[Moment, ...]:
    """The moments of a rank's row at which it may hold most: of two alike, the one that holds no more is left out."""
    found: dict[tuple[Kind, int, int, bool], list[Moment]] = {}
    for moment in _all_moments(row):
        key = moment.kind, moment.stage, moment.held[moment.stage].summed, moment.stripped
        rivals = found.setdefault(key, [])
        if not any(_covers(other, moment) for other in rivals):
            rivals[:] = [other for other in rivals if not _covers(moment, other)] + [moment]
    return tuple(moment for rivals in found.values() for moment in rivals)


def _covers(left: Moment, right: Moment) -> bool:
    pairs = zip(left.held.values(), right.held.values(), strict=True)
    return all(a >= b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def _all_moments(row: Sequence[Action]) -> Iterator[Moment]:
    before: Mapping[int, Held] = {stage: Held() for stage in _stages(row)}
    for action, held in states(row):
        if action.kind in COMPUTE:
            own, after = before[action.stage], held[action.stage]
            copied = max(own.copied, after.copied)  # a forward begins with its copies
            now = {**before, action.stage: own._replace(copied=copied)}
            is_stripped = action.kind is Kind.BACKWARD_WEIGHT and after.stripped < own.stripped
            yield Moment(action.kind, action.stage, now, is_stripped)
        before = held
    if any(action.kind in BACKWARDS for action in row):
        yield Moment(Kind.STEP, min(before), {stage: Held(summed=1) for stage in before})


def states(row: Sequence[Action]) -> Iterator[tuple[Action, Mapping[int, Held]]]:
    """Each action with what is held after it, by stage."""
    changes: dict[int, Counter[tuple[int, str]]] = defaultdict(Counter)
    for stage, kind, begin, end in _spans(row):
        changes[begin][stage, kind] += 1
        changes[end][stage, kind] -= 1
    held = {stage: Held() for stage in _stages(row)}
    for index, action in enumerate(row):
        held = dict(held)
        for (stage, kind), change in changes[index].items():
            held[stage] = held[stage]._replace(**{kind: getattr(held[stage], kind) + change})
        yield action, held


def _stages(row: Sequence[Action]) -> list[int]:
    return sorted({action.stage for action in row})


def _spans(row: Sequence[Action]) -> Iterator[_Span]:
    never, trains = len(row), any(action.kind in BACKWARDS for action in row)
    when = {(action.stage, action.microbatch, action.kind): index for index, action in enumerate(row)}
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
        yield _Span(stage, "summed", min(own.end for (index, _), own in times.items() if index == stage), never)


def _of_microbatch(
    own: _Times, before: _Times, behind: _Times, never: int, trains: bool
) -> Iterator[tuple[str, int, int]]:
    """Kind, begin and end, where these differ. `before` and `behind` are the stages beside it, if on the same rank."""
    is_again = own.recompute < never
    if is_again or not trains:
        handed_over = max(own.back, behind.end)
        yield "bare", own.forward, min(own.end, handed_over)
    if trains and behind.end < never:
        yield "bare", own.end, behind.end  # the next stage, on the same rank, still has them
    if is_again:
        yield "copied", own.forward, own.end
    if trains:
        yield "kept", own.recompute if is_again else own.forward, own.back
    stripped = own.first if is_again else max(own.first, behind.end)
    yield "halved", own.first, min(stripped, own.second)
    yield "stripped", stripped, own.second
    yield "passed", own.first, before.back
    yield "lent", max(own.first, before.back), own.second
    yield "returned", own.whole, before.back
    yield "sent", own.end, never
