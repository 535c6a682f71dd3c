"""Whether a lowered schedule is complete, in order and free of deadlocks; linear in the number of actions.

Two properties are proven separately. Under rendezvous a send blocks until its receive is reached, and the other
way round: that is the strictest runtime. With buffered sends only receives block. Beyond hanging, messages must have
the same order at both ends of a link: NCCL has no tags, so crossed messages would deliver wrong data silently.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product, zip_longest

from pipecompile.errors import ScheduleError
from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind, Schedule
from pipecompile.schedule.dependencies import Needs, compute_needs, in_order, message
from pipecompile.schedule.problem import Problem, Work

__all__ = ["check"]

_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


def check(schedule: Schedule, problem: Problem | None = None) -> list[str]:
    """Every violation, one line each, naming rank, action and peer; empty if the schedule is sound.

    Without a problem, a boundary over which no gradient is sent or received at all counts as having none.
    """
    subject = _Subject(schedule, problem or _seen(schedule))
    # Each step speaks only where the one before found nothing: it relies on it.
    return (
        list(_counts(subject))
        or [*_orders(subject), *_last_stage(schedule)]
        or [*_links(subject), *_deadlocks(subject)]
    )


@dataclass(frozen=True)
class _Subject:
    """A schedule with the tables that the checks share."""

    schedule: Schedule
    problem: Problem

    @cached_property
    def counts(self) -> Counter[Action]:
        return Counter(action for _, action in self.schedule)

    @cached_property
    def places(self) -> dict[Action, int]:
        """The index of each action in the row of its rank."""
        return {action: index for row in self.schedule.rows for index, action in enumerate(row)}

    @cached_property
    def trains(self) -> bool:
        return any(action.kind in BACKWARDS for action in self.counts)

    @cached_property
    def messages(self) -> dict[Action, tuple[Action, Action]]:
        """By compute action the send and the receive of what it hands to another rank."""
        stages = len(self.schedule.placement)
        pairs = ((a, message(a, stages, self.problem.gradient)) for a in self.counts if a.kind in COMPUTE)
        return {a: pair for a, pair in pairs if pair and self.rank(pair[0]) != self.rank(pair[1])}

    def rank(self, action: Action) -> int:
        return self.schedule.placement[action.stage]

    def name(self, action: Action) -> str:
        """The action with its rank and, for a transfer, the peer's."""
        if action.kind not in _PARTNERS:
            return f"rank {self.rank(action)}: {action}"
        towards = "to" if action.kind in _SENDS else "from"
        peer = action.stage + _PARTNERS[action.kind][1]
        known = 0 <= peer < len(self.schedule.placement)
        return f"rank {self.rank(action)}: {action} {towards} rank {self.schedule.placement[peer] if known else '?'}"


def _seen(schedule: Schedule) -> Problem:
    """A problem without costs, with gradients over the boundaries over which some are sent or received."""
    sent = {a.stage - 1 for _, a in schedule if a.kind is Kind.SEND_BACKWARD}
    received = {a.stage for _, a in schedule if a.kind is Kind.RECEIVE_BACKWARD}
    ranks = schedule.placement
    gradient = tuple(s in sent | received or ranks[s] == ranks[s + 1] for s in range(len(ranks) - 1))
    free = (0,) * len(gradient)
    return Problem(ranks, schedule.microbatches, (Work(0, 0),) * len(ranks), free, free, gradient)


def _counts(subject: _Subject) -> Iterator[str]:
    """Each action that must be there is there once, and no other."""
    expected = set(_expected(subject))
    for action in sorted(expected | subject.counts.keys(), key=lambda a: (a.stage, a.microbatch or 0, a.kind)):
        count, wanted = subject.counts[action], action in expected
        if action.kind is Kind.RECOMPUTE and count <= subject.trains:
            continue
        if count != wanted:
            problem = "is missing" if not count else f"appears {count} times" if wanted else "is out of place"
            yield f"{subject.name(action)} {problem}"


def _expected(subject: _Subject) -> Iterator[Action]:
    schedule = subject.schedule
    for stage, microbatch in product(range(len(schedule.placement)), range(schedule.microbatches)):
        yield Action(stage, Kind.FORWARD, microbatch)
        if subject.trains:
            split = Action(stage, Kind.BACKWARD_INPUT, microbatch), Action(stage, Kind.BACKWARD_WEIGHT, microbatch)
            halved = any(action in subject.counts for action in split)
            yield from split if halved else (Action(stage, Kind.BACKWARD, microbatch),)
    if subject.trains:
        yield from (Action(stage, Kind.REDUCE) for stage in range(len(schedule.placement)))
    for pair in subject.messages.values():
        yield from pair


def _orders(subject: _Subject) -> Iterator[str]:
    """Each action stands after those on its own rank whose result it uses."""
    for first, second in _ordered_pairs(subject):
        places = subject.places
        if first in places and second in places and places[second] < places[first]:
            yield f"{subject.name(second)} stands before {first}, which it needs"


def _ordered_pairs(subject: _Subject) -> Iterator[tuple[Action, Action]]:
    needs = compute_needs(subject.problem, subject.schedule)
    for action in subject.counts:
        if action.kind not in COMPUTE:
            continue
        for need in needs(action):
            if subject.rank(need) == subject.rank(action):
                yield need, action
            elif need in subject.messages:
                yield subject.messages[need][1], action
        if action in subject.messages:
            yield action, subject.messages[action][0]
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            yield Action(action.stage, Kind.RECOMPUTE, action.microbatch), action
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            yield action, Action(action.stage, Kind.REDUCE)


def _last_stage(schedule: Schedule) -> Iterator[str]:
    """The runtime stores losses by append and reads them by index: the last stage's forwards come in order."""
    last = len(schedule.placement) - 1
    rank = schedule.placement[last]
    row = [a for a in schedule.rows[rank] if a.stage == last and a.kind is Kind.FORWARD]
    for left, right in pairwise(row):
        if (left.microbatch or 0) > (right.microbatch or 0):
            yield f"rank {rank}: {right} comes after {left}, but the last stage takes its microbatches in order"


def _links(subject: _Subject) -> Iterator[str]:
    """The k-th message that a rank sends to another is the k-th that the other expects from it."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    expected: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, action in subject.schedule:
        if action.kind in _SENDS:
            sent[rank, subject.rank(_partner(action))].append(_partner(action))
        elif action.kind in _PARTNERS:
            expected[subject.rank(_partner(action)), rank].append(action)
    for link in sorted(sent):
        pairs = zip_longest(sent[link], expected[link])
        crossed = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if crossed is not None:
            yield f"{subject.name(crossed[1])} would get the data of {_partner(crossed[0])}: sends and receives cross"


def _partner(action: Action) -> Action:
    kind, step = _PARTNERS[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def _deadlocks(subject: _Subject) -> Iterator[str]:
    needs = {"if sends wait for their receives": _rendezvous(subject), "even if sends are buffered": _buffered}
    for condition, rule in needs.items():
        try:
            for _ in in_order(subject.schedule.rows, rule):
                pass
        except ScheduleError as error:
            yield f"deadlock {condition}: {error}"


def _rendezvous(subject: _Subject) -> Needs:
    """A transfer ends once its partner is reached, that is, once the action before the partner is done."""
    before = {b: a for row in subject.schedule.rows for a, b in pairwise(row)}

    def needs(action: Action) -> list[Action]:
        previous = before.get(_partner(action)) if action.kind in _PARTNERS else None
        return [] if previous is None else [previous]

    return needs


def _buffered(action: Action) -> list[Action]:
    return [_partner(action)] if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD) else []
