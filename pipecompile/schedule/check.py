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
from pipecompile.ir.schedule import (
    BACKWARDS,
    COMPUTE,
    WEIGHT_GRADIENT_KINDS,
    Action,
    Kind,
    Schedule,
)
from pipecompile.schedule.dependencies import (
    Dependencies,
    compute_dependencies,
    dependency_order,
    message_of,
)
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.weight_versions import version_violations, without_versions

__all__ = ["check_schedule"]

_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


def check_schedule(schedule: Schedule, problem: PlacedProblem | None = None) -> list[str]:
    """Every violation, one line each, naming rank, action and peer; empty if the schedule is sound.

    Without a problem nothing is said of memory, and a boundary over which no gradient is sent or received at all
    counts as having none.
    """
    if problem and (schedule.placement, schedule.microbatches) != (
        problem.placement,
        problem.microbatches,
    ):
        return [
            "the schedule has another placement or another number of microbatches than its problem"
        ]
    subject = _CheckedSchedule(without_versions(schedule), problem or _seen(schedule))
    # Each step speaks only where the one before found nothing: it relies on it.
    return (
        list(_counts(subject))
        or [
            *_orders(subject),
            *_in_microbatch_order(subject),
            *version_violations(schedule),
            *_memory(subject),
        ]
        or [*_links(subject), *_deadlocks(subject)]
    )


@dataclass(frozen=True)
class _CheckedSchedule:
    """A schedule with the tables that the checks share."""

    schedule: Schedule
    problem: PlacedProblem

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
        pairs = (
            (a, message_of(a, stages, self.problem.gradient))
            for a in self.counts
            if a.kind in COMPUTE
        )
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


def _seen(schedule: Schedule) -> PlacedProblem:
    """A problem without costs, with gradients over the boundaries over which some are sent or received."""
    sent = {a.stage - 1 for _, a in schedule if a.kind is Kind.SEND_BACKWARD}
    received = {a.stage for _, a in schedule if a.kind is Kind.RECEIVE_BACKWARD}
    ranks = schedule.placement
    gradient = tuple(
        s in sent | received or ranks[s] == ranks[s + 1] for s in range(len(ranks) - 1)
    )
    free = (0,) * len(gradient)
    return PlacedProblem(
        ranks, schedule.microbatches, (StageCosts(0, 0),) * len(ranks), free, free, gradient
    )


def _counts(subject: _CheckedSchedule) -> Iterator[str]:
    """Each action that must be there is there once, and no other."""
    counts, expected = subject.counts, set(_expected(subject))
    suspect = (expected ^ counts.keys()) | {action for action, count in counts.items() if count > 1}
    for action in sorted(
        suspect, key=lambda a: (a.stage, -1 if a.microbatch is None else a.microbatch, a.kind)
    ):
        count, wanted = counts[action], action in expected
        if count != wanted and not (count == 1 and _is_optional(subject, action)):
            problem = (
                "is missing"
                if not count
                else f"appears {count} times"
                if wanted
                else "is out of place"
            )
            yield f"{subject.name(action)} {problem}"


def _is_optional(subject: _CheckedSchedule, action: Action) -> bool:
    """A recompute that saves nothing, and optimizer steps, which are the training loop's if all step together."""
    if action.kind is Kind.STEP:
        return subject.schedule.weight_versions != "synchronous"
    return action.kind is Kind.RECOMPUTE and subject.trains


def _expected(subject: _CheckedSchedule) -> Iterator[Action]:
    schedule, counts = subject.schedule, subject.counts
    for stage, microbatch in product(range(len(schedule.placement)), range(schedule.microbatches)):
        yield Action(stage, Kind.FORWARD, microbatch)
        if subject.trains:
            again = Action(stage, Kind.RECOMPUTE, microbatch)
            if subject.problem.recomputes(again):
                yield again
            split = (
                Action(stage, Kind.BACKWARD_INPUT, microbatch),
                Action(stage, Kind.BACKWARD_WEIGHT, microbatch),
            )
            halved = split[0] in counts or split[1] in counts
            yield from split if halved else (Action(stage, Kind.BACKWARD, microbatch),)
    if subject.trains and schedule.weight_versions == "synchronous":
        yield from (Action(stage, Kind.REDUCE) for stage in range(len(schedule.placement)))
    for pair in subject.messages.values():
        yield from pair


def _orders(subject: _CheckedSchedule) -> Iterator[str]:
    """Each action stands after those on its own rank whose result it uses."""
    for first, second in _ordered_pairs(subject):
        places = subject.places
        if first in places and second in places and places[second] < places[first]:
            yield f"{subject.name(second)} stands before {first}, which it needs"


def _ordered_pairs(subject: _CheckedSchedule) -> Iterator[tuple[Action, Action]]:
    needs = compute_dependencies(subject.problem, subject.schedule)
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
        if action.kind in BACKWARDS:
            yield Action(action.stage, Kind.RECOMPUTE, action.microbatch), action
        if action.kind in WEIGHT_GRADIENT_KINDS:
            yield action, Action(action.stage, Kind.REDUCE)
    for stage in range(len(subject.schedule.placement)):
        yield Action(stage, Kind.REDUCE), Action(stage, Kind.STEP)


def _in_microbatch_order(subject: _CheckedSchedule) -> Iterator[str]:
    """What the runtime, and the order in which the unsplit run adds gradients, leave no choice about."""
    last = len(subject.schedule.placement) - 1
    for rank, row in enumerate(subject.schedule.rows):
        # torch stores losses by append and reads them by index.
        losses = [a for a in row if a.stage == last and a.kind is Kind.FORWARD]
        yield from _falling(rank, losses, "the last stage takes its microbatches in order")
        sums: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in WEIGHT_GRADIENT_KINDS:
                sums[action.stage].append(action)
        for actions in sums.values():
            yield from _falling(
                rank, actions, "a stage sums its gradients in the order of the microbatches"
            )


def _falling(rank: int, actions: list[Action], rule: str) -> Iterator[str]:
    for left, right in pairwise(actions):
        if (left.microbatch or 0) > (right.microbatch or 0):
            yield f"rank {rank}: {right} comes after {left}, but {rule}"


def _memory(subject: _CheckedSchedule) -> Iterator[str]:
    """What each rank holds, from its own order alone, stays within its cap."""
    problem = subject.problem
    for rank, (row, cap) in enumerate(
        zip(subject.schedule.compute, problem.caps or (), strict=False)
    ):
        held = problem.held_bytes(row)
        over = next((action for action, size in zip(row, held, strict=True) if size > cap), None)
        if over is not None:
            excess = max(held) - cap
            yield f"rank {rank}: from {over} on it holds up to {max(held)} bytes, {excess} over its cap of {cap}"


def _links(subject: _CheckedSchedule) -> Iterator[str]:
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


def _deadlocks(subject: _CheckedSchedule) -> Iterator[str]:
    strict = _stuck(subject, _rendezvous(subject))
    if strict:
        yield f"deadlock if sends wait for their receives: {strict}"
        buffered = _stuck(subject, _buffered)  # it can only hang where the stricter runtime does
        if buffered:
            yield f"deadlock even if sends are buffered: {buffered}"


def _stuck(subject: _CheckedSchedule, needs: Dependencies) -> str | None:
    """What each rank waits for in the end, if not all of them come to theirs."""
    try:
        for _ in dependency_order(subject.schedule.rows, needs):
            pass
    except ScheduleError as error:
        return str(error)
    return None


def _rendezvous(subject: _CheckedSchedule) -> Dependencies:
    """A transfer ends once its partner is reached, that is, once the action before the partner is done."""
    before = {b: a for row in subject.schedule.rows for a, b in pairwise(row)}

    def needs(action: Action) -> list[Action]:
        previous = before.get(_partner(action)) if action.kind in _PARTNERS else None
        return [] if previous is None else [previous]

    return needs


def _buffered(action: Action) -> list[Action]:
    return (
        [_partner(action)] if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD) else []
    )
