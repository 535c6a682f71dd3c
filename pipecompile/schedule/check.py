"""Checks that a schedule with its transfers is complete, in order and free of deadlocks.

The time is linear in the number of actions. Two properties are proven separately. Under rendezvous
a send blocks until its receive is reached, and the other way around: that is the strictest runtime.
With buffered sends only receives block. Even without a deadlock, messages must have the same order
at both ends of a link: NCCL has no tags, so crossed messages would silently deliver wrong data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product, zip_longest

from pipecompile.errors import ScheduleError
from pipecompile.ir.action_order import Dependencies, dependency_order, message_of
from pipecompile.ir.schedule import (
    BACKWARDS,
    COMPUTE,
    WEIGHT_GRADIENT_KINDS,
    Action,
    Kind,
    Schedule,
)
from pipecompile.ir.size import size_text
from pipecompile.schedule.dependencies import (
    compute_dependencies,
    waits_for_replicas,
)
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.weight_versions import version_violations, without_versions

__all__ = ["check_schedule"]

# By kind of transfer the kind at its other end, and how many stages further that is.
_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
_RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})


def check_schedule(schedule: Schedule, problem: PlacedProblem | None = None) -> list[str]:
    """Return every violation, one line each with rank, action and peer; empty if it is sound.

    Without a problem memory is not checked, and a boundary over which no gradient is sent or
    received at all counts as having none.
    """
    if problem and (schedule.placement, schedule.microbatches) != (
        problem.placement,
        problem.microbatches,
    ):
        return [
            "the schedule has another placement or another number of microbatches than its problem"
        ]
    checked = _CheckedSchedule(without_versions(schedule), problem or _problem_seen_in(schedule))
    # Each step relies on the one before it, and so runs only if that found nothing.
    return (
        list(_count_violations(checked))
        or [
            *_order_violations(checked),
            *_microbatch_violations(checked),
            *version_violations(schedule),
            *_memory_violations(checked),
        ]
        or [*_crossed_messages(checked), *_deadlocks(checked)]
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
    def places(self) -> dict[tuple[int, Action], int]:
        """The index of each action in its rank's row; replicas of a stage share a reduction."""
        return {
            (rank, action): index
            for rank, row in enumerate(self.schedule.rows)
            for index, action in enumerate(row)
        }

    @cached_property
    def trains(self) -> bool:
        return any(action.kind in BACKWARDS for action in self.counts)

    @cached_property
    def messages(self) -> dict[Action, tuple[Action, Action]]:
        """The send and the receive of each compute action's result that another rank needs."""
        stages = len(self.schedule.placement)
        messages = {}
        for action in self.counts:
            pair = None
            if action.kind in COMPUTE:
                pair = message_of(action, stages, self.problem.gradient)
            if pair and self.rank(pair[0]) != self.rank(pair[1]):
                messages[action] = pair
        return messages

    def rank(self, action: Action) -> int:
        return self.schedule.rank_of(action)

    def name(self, action: Action) -> str:
        """Return the action with its rank and, for a transfer, its peer's rank."""
        text = f"rank {self.rank(action)}: {action}"
        if action.kind not in _PARTNERS:
            return text
        stage = action.stage + _PARTNERS[action.kind][1]
        is_stage = 0 <= stage < len(self.schedule.placement)
        peer = self.rank(action._replace(stage=stage)) if is_stage else "?"
        return f"{text} {'to' if action.kind in _SENDS else 'from'} rank {peer}"


def _problem_seen_in(schedule: Schedule) -> PlacedProblem:
    """Return a problem without costs, with a gradient where the schedule sends or receives one."""
    placement, crossed = schedule.placement, set[int]()
    for _, action in schedule:
        if action.kind is Kind.SEND_BACKWARD:
            crossed.add(action.stage - 1)
        elif action.kind is Kind.RECEIVE_BACKWARD:
            crossed.add(action.stage)
    gradient = tuple(
        # Within a rank a gradient is handed over without a message, and so leaves no trace here.
        stage in crossed or left == right
        for stage, (left, right) in enumerate(pairwise(placement))
    )
    free = (0,) * len(gradient)
    costs = (StageCosts(0, 0),) * len(placement)
    return PlacedProblem(placement, schedule.microbatches, costs, free, free, gradient)


def _count_violations(checked: _CheckedSchedule) -> Iterator[str]:
    """Each required action must be there once, and no other one."""
    counts, required = checked.counts, set(_required_actions(checked))
    repeated = {action for action in counts if not _is_once(checked, action)}
    # Only these can be wrong, and in a sound schedule there are none: the sort below is free.
    suspects = (required ^ counts.keys()) | repeated
    for action in sorted(suspects, key=_by_stage_and_microbatch):
        count = counts[action]
        if count == 1 and _is_optional(checked, action):
            continue
        if not count:
            yield f"{checked.name(action)} is missing"
        elif action in required:
            yield f"{checked.name(action)} appears {count} times"
        else:
            yield f"{checked.name(action)} is out of place"


def _is_once(checked: _CheckedSchedule, action: Action) -> bool:
    """Return whether a schedule has an action once; a reduction on each replica of its stage."""
    count, places = checked.counts[action], checked.places
    if action.kind is not Kind.REDUCE:
        return count == 1
    ranks = checked.schedule.stage_ranks[action.stage]
    return count == len(ranks) and all((rank, action) in places for rank in ranks)


def _by_stage_and_microbatch(action: Action) -> tuple[int, int, Kind]:
    microbatch = -1 if action.microbatch is None else action.microbatch
    return action.stage, microbatch, action.kind


def _is_optional(checked: _CheckedSchedule, action: Action) -> bool:
    """Return whether the schedule may have `action` without needing it.

    Recomputes that save nothing are allowed, and the steps of asynchronous schedules.

    In synchronous schedules all stages step together, in the training loop.
    """
    if action.kind is Kind.STEP:
        return checked.schedule.weight_versions != "synchronous"
    return action.kind is Kind.RECOMPUTE and checked.trains


def _required_actions(checked: _CheckedSchedule) -> Iterator[Action]:
    """Yield each action that the schedule must have exactly once."""
    schedule, counts = checked.schedule, checked.counts
    for stage, microbatch in product(range(len(schedule.placement)), range(schedule.microbatches)):
        yield Action(stage, Kind.FORWARD, microbatch)
        if checked.trains:
            recompute = Action(stage, Kind.RECOMPUTE, microbatch)
            if checked.problem.recomputes(recompute):
                yield recompute
            # The schedule itself says whether it splits this backward.
            halves = (
                Action(stage, Kind.BACKWARD_INPUT, microbatch),
                Action(stage, Kind.BACKWARD_WEIGHT, microbatch),
            )
            is_split = halves[0] in counts or halves[1] in counts
            yield from halves if is_split else (Action(stage, Kind.BACKWARD, microbatch),)
    # Asynchronous schedules sum within their optimizer steps.
    if checked.trains and schedule.weight_versions == "synchronous":
        yield from (Action(stage, Kind.REDUCE) for stage in range(len(schedule.placement)))
    for pair in checked.messages.values():
        yield from pair


def _order_violations(checked: _CheckedSchedule) -> Iterator[str]:
    """Each action must stand behind those on its own rank whose results it uses."""
    for first, second in _ordered_pairs(checked):
        rank = checked.rank(first)
        before, after = (checked.places.get((rank, action)) for action in (first, second))
        if before is not None and after is not None and after < before:
            yield f"{checked.name(second)} stands before {first}, which it needs"


def _ordered_pairs(checked: _CheckedSchedule) -> Iterator[tuple[Action, Action]]:
    """Yield pairs of actions on one rank of which the first must come first."""
    dependencies = compute_dependencies(checked.problem, checked.schedule)
    for action in checked.counts:
        if action.kind not in COMPUTE:
            continue
        for needed in dependencies(action):
            # Within a rank the result is handed over directly; else the receive must come first.
            if checked.rank(needed) == checked.rank(action):
                yield needed, action
            elif needed in checked.messages:
                yield checked.messages[needed][1], action
        if action in checked.messages:
            yield action, checked.messages[action][0]
        # The pair is skipped where the schedule has no such recompute.
        if action.kind in BACKWARDS:
            yield Action(action.stage, Kind.RECOMPUTE, action.microbatch), action
        if action.kind in WEIGHT_GRADIENT_KINDS:
            yield action, Action(action.stage, Kind.REDUCE)
    for stage in range(len(checked.schedule.placement)):
        yield Action(stage, Kind.REDUCE), Action(stage, Kind.STEP)


def _microbatch_violations(checked: _CheckedSchedule) -> Iterator[str]:
    """Two kinds of actions must take the microbatches in ascending order.

    torch appends the losses of the last stage to a list and reads them by index. Gradients must be
    added in the order in which the unsplit run adds them, so that the sums are equal bit for bit.
    """
    last = len(checked.schedule.placement) - 1
    for rank, row in enumerate(checked.schedule.rows):
        losses = [a for a in row if a.stage == last and a.kind is Kind.FORWARD]
        yield from _descents(rank, losses, "the last stage takes its microbatches in order")
        sums: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in WEIGHT_GRADIENT_KINDS:
                sums[action.stage].append(action)
        for actions in sums.values():
            yield from _descents(
                rank, actions, "a stage sums its gradients in the order of the microbatches"
            )


def _descents(rank: int, actions: list[Action], rule: str) -> Iterator[str]:
    for left, right in pairwise(actions):
        if (left.microbatch or 0) > (right.microbatch or 0):
            yield f"rank {rank}: {right} comes after {left}, but {rule}"


def _memory_violations(checked: _CheckedSchedule) -> Iterator[str]:
    """Yield the ranks that hold more than their cap, which follows from a rank's own order."""
    problem = checked.problem
    pairs = zip(checked.schedule.compute, problem.caps or (), strict=False)
    for rank, (row, cap) in enumerate(pairs):
        # Time plays no role: a rank takes and frees bytes in the order of its row.
        held = problem.held_bytes(row)
        over = next((action for action, size in zip(row, held, strict=True) if size > cap), None)
        if over is not None:
            yield (
                f"rank {rank}: from {over} on it holds up to {size_text(max(held))}, "
                f"{size_text(max(held) - cap)} over its cap of {size_text(cap)}"
            )


def _crossed_messages(checked: _CheckedSchedule) -> Iterator[str]:
    """The k-th message that a rank sends to another must be the k-th that the other expects."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    expected: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, action in checked.schedule:
        if action.kind in _SENDS:
            receive = _partner(action)
            sent[rank, checked.rank(receive)].append(receive)
        elif action.kind in _RECEIVES:
            expected[checked.rank(_partner(action)), rank].append(action)
    # Counts are right by now, so a link without sends has no receives either.
    for link in sorted(sent):
        pairs = zip_longest(sent[link], expected[link])
        crossed = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if crossed is not None:
            yield (
                f"{checked.name(crossed[1])} would get the data of {_partner(crossed[0])}: "
                "sends and receives cross"
            )


def _partner(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    kind, step = _PARTNERS[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def _deadlocks(checked: _CheckedSchedule) -> Iterator[str]:
    strict = _deadlock(checked, _rendezvous(checked))
    if strict:
        yield f"deadlock if sends wait for their receives: {strict}"
        # With buffered sends a schedule can only deadlock where the stricter runtime does.
        buffered = _deadlock(checked, _buffered)
        if buffered:
            yield f"deadlock even if sends are buffered: {buffered}"


def _deadlock(checked: _CheckedSchedule, dependencies: Dependencies) -> str | None:
    """Return what each rank waits for in the end; None if all actions can happen."""
    waits = waits_for_replicas(checked.schedule)
    try:
        for _ in dependency_order(
            checked.schedule.rows, lambda action: [*dependencies(action), *waits.get(action, ())]
        ):
            pass
    except ScheduleError as error:
        return str(error)
    return None


# Each rank of these two is in its send while the other is not yet at the receive.
# With buffered sends all goes well; under rendezvous both stop for ever:
#
#     rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 …
#     rank 1   1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 …
def _rendezvous(checked: _CheckedSchedule) -> Dependencies:
    """Return what blocking transfers wait for: a transfer ends when its partner is reached."""
    # A transfer is reached as soon as the action in front of it in its row is done.
    before = {right: left for row in checked.schedule.rows for left, right in pairwise(row)}

    def dependencies(action: Action) -> list[Action]:
        previous = before.get(_partner(action)) if action.kind in _PARTNERS else None
        # It is enough to wait for what stands in front of the partner:
        # were it the partner itself, the two would wait for each other.
        return [] if previous is None else [previous]

    return dependencies


def _buffered(action: Action) -> list[Action]:
    return [_partner(action)] if action.kind in _RECEIVES else []
