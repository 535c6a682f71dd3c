"""Schedules: which rank does what, in which order. These are pure values without PyTorch.

An action is written as torch.distributed.pipelining writes it, `<stage><KIND><microbatch>`:

    0F2        forward of microbatch 2 in stage 0         1SEND_F2   send its outputs to stage 2
    0B2        its full backward                          1RECV_F2   receive stage 0's outputs
    0I2, 0W2   input backward, then weight backward       1SEND_B2   send input gradients to stage 0
    0R2        recompute its forward, for the backward    1RECV_B2   receive stage 2's gradients
    0REDUCE_GRAD  finish the gradients of stage 0: sum over the ranks that hold them, divide by M

torch has no words for two things. `0STEP` is the optimizer's step of stage 0, and `0STEP2` one
that follows microbatch 2. A weight version is written after an `@`: `0F2@1`. Schedules that update
the weights once, at the end of the step, name no versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Literal, NamedTuple

from pipecompile.ir.serialization import NonNegative, Positive, Value
from pipecompile.ir.stage_ranks import stage_ranks

__all__ = [
    "BACKWARDS",
    "COMPUTE",
    "TRANSFERS",
    "WEIGHT_GRADIENT_KINDS",
    "Action",
    "CriticalEvent",
    "Event",
    "Idle",
    "Kind",
    "Schedule",
    "StartReason",
    "Timeline",
    "WeightVersions",
]


class Kind(StrEnum):
    """What an action does; the value is its spelling."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    BACKWARD = "B"
    RECOMPUTE = "R"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE_GRAD"
    STEP = "STEP"

    # Enum's own hash runs in Python, and schedules hash actions by the hundred thousand.
    __hash__ = str.__hash__


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
COMPUTE = frozenset(
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD, Kind.RECOMPUTE}
)
# After one of these the weight gradients of a microbatch are there; BACKWARDS begin a backward.
WEIGHT_GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
TRANSFERS = frozenset(
    {Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD}
)
# Without leading zeros each action has one spelling, so equal schedules are equal text.
_NUMBER = r"0|[1-9][0-9]*"
_KINDS = "REDUCE_GRAD|STEP|SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B|R"
_PATTERN = re.compile(rf"({_NUMBER})({_KINDS})({_NUMBER}|)(?:@({_NUMBER}))?")

WeightVersions = Literal["synchronous", "stashed", "vertical-sync", "double-buffered"]


class Action(NamedTuple):
    """One unit of a rank's work.

    `microbatch` is None for an action that covers all of them, `version` the weight version.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    version: int | None = None

    # A search makes thousands of schedules of the same few hundred actions.
    @staticmethod
    @cache
    def parse(text: str) -> Action:
        """Return the action that torch's notation names; ValueError says what is wrong with it."""
        match = _PATTERN.fullmatch(text)
        # A reduction never names a microbatch, a step may, and all other actions must.
        if match is None or (
            match[2] != "STEP" and (match[2] == "REDUCE_GRAD") != (match[3] == "")
        ):
            raise ValueError(
                f"{text!r} is not an action such as '0F2', '1SEND_B0', '0REDUCE_GRAD' or '0F2@1'"
            )
        microbatch, version = (int(digits) if digits else None for digits in match.group(3, 4))
        return Action(int(match[1]), Kind(match[2]), microbatch, version)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.kind.value}{microbatch}{version}"


# dict=True, because a cached_property needs a __dict__, which a msgspec struct lacks otherwise.
class Schedule(Value, frozen=True, kw_only=True, dict=True):
    """For each rank its actions, in the order in which it performs them.

    `placement[stage]` is the rank of a stage, or the first one of its replicas, which take its
    microbatches in turns (`ir.stage_ranks`). `weight_versions` says which weights a microbatch
    sees:

        synchronous      those of the step
        stashed          the latest of each stage in its forward, and the same in its backward
                         (PipeDream)
        vertical-sync    on all stages the version that the first stage had (PipeDream,
                         section 3.3)
        double-buffered  the weights of the update before the last one (PipeDream-2BW)
    """

    name: str
    weight_versions: WeightVersions = "synchronous"
    microbatches: Positive
    placement: tuple[NonNegative, ...]
    actions: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.placement or max(self.placement) >= len(self.actions):
            raise ValueError(
                f"placement {list(self.placement)} does not fit {len(self.actions)} ranks"
            )
        # This parses every action too, so a schedule with a misspelled one cannot be made.
        stage_count, ranks = len(self.placement), self.stage_ranks
        for rank, action in self:
            if action.stage >= stage_count or not _is_at(action, rank, ranks[action.stage]):
                raise ValueError(
                    f"rank {rank} performs {action}, but its stage is not placed there"
                )
            if action.microbatch is not None and action.microbatch >= self.microbatches:
                raise ValueError(
                    f"rank {rank} performs {action}, but there are {self.microbatches} microbatches"
                )

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        return ((rank, action) for rank, row in enumerate(self.rows) for action in row)

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, parsed."""
        return tuple(tuple(map(Action.parse, row)) for row in self.actions)

    @property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank that occupy it: transfers and reductions are left out."""
        return tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.rows)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @cached_property
    def stage_ranks(self) -> tuple[range, ...]:
        """The ranks of each stage: several if it has replicas."""
        return stage_ranks(self.placement)

    def rank_of(self, action: Action) -> int:
        """Return the rank that performs an action; of one for all microbatches the first."""
        # The same rule as in `_is_at`, by which the schedule was checked.
        ranks = self.stage_ranks[action.stage]
        return ranks[(action.microbatch or 0) % len(ranks)]

    def first_microbatches(self, microbatches: int) -> Schedule:
        """Return the same order without the later microbatches; no earlier one depends on them."""
        # The last minibatch of a data set may be smaller; its step runs a part of the plan's order.
        if microbatches == self.microbatches:
            return self
        rows = [
            [a for a in row if a.microbatch is None or a.microbatch < microbatches]
            for row in self.rows
        ]
        return Schedule.of(self.name, microbatches, self.placement, rows, self.weight_versions)

    @staticmethod
    def of(
        name: str,
        microbatches: int,
        placement: Sequence[int],
        rows: Sequence[Sequence[Action]],
        weight_versions: WeightVersions = "synchronous",
    ) -> Schedule:
        """Return a schedule of parsed actions."""
        actions = tuple(tuple(map(str, row)) for row in rows)
        return Schedule(
            name=name,
            weight_versions=weight_versions,
            microbatches=microbatches,
            placement=tuple(placement),
            actions=actions,
        )


def _is_at(action: Action, rank: int, ranks: range) -> bool:
    """Return whether `rank` may perform an action of a stage on `ranks`."""
    if action.microbatch is None:
        return rank in ranks
    # Of a stage on ranks 0 and 1, microbatch 3 is rank 1's.
    return rank == ranks[action.microbatch % len(ranks)]


class Event(NamedTuple):
    """An action and when it happened, in nanoseconds since the step began."""

    action: Action
    start_ns: int
    end_ns: int


StartReason = Literal["start", "rank", "send", "dependency", "transfer", "queue", "reduction"]


class CriticalEvent(NamedTuple):
    """An event on the critical path, and why it does not begin earlier.

    start       it begins with the step
    rank        its rank is busy until then with the event before it on the path
    send        its rank is blocked until then by sending the result of the event before it
    dependency  its input is computed until then by the event before it
    transfer    its input is under way until then from the event before it
    queue       its input waits for a link that is busy with messages ahead of it; the event
                before it on the path produced the first of these
    reduction   it is a sum over replicas that follows the event before it
    """

    rank: int
    event: Event
    why: StartReason


class Idle(Value, frozen=True, kw_only=True):
    """How long a rank computed nothing, by cause; the causes and its busy time make the makespan.

    transfer    the part of each wait that messages without travel time would save, sends that
                block the rank, and reductions after its last action
    memory      a forward had all its inputs, but its bytes would have exceeded the rank's cap
    imbalance   the part of the other waits that no order removes, since a rank has more to do
    dependency  the rest
    """

    # A rank that is busy for 12 of 21, waits 4 for messages and could do with 3 less if the
    # heaviest rank had less to do: transfer 4, imbalance 3, dependency 21 − 12 − 4 − 3 = 2.
    dependency_ns: NonNegative
    transfer_ns: NonNegative
    memory_ns: NonNegative = 0
    imbalance_ns: NonNegative = 0

    @property
    def total_ns(self) -> int:
        """The idle time of all causes together."""
        return self.dependency_ns + self.transfer_ns + self.memory_ns + self.imbalance_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step: for each rank its compute events, why it idled, and its bytes after each.

    `reductions` are the sums over the replicas of a rank's stages; they run beside its compute.
    """

    events: tuple[tuple[Event, ...], ...]
    idle: tuple[Idle, ...]
    held_bytes: tuple[tuple[int, ...], ...] = ()
    reductions: tuple[tuple[Event, ...], ...] = ()

    @property
    def makespan_ns(self) -> int:
        """The end of the last event or reduction."""
        return max((row[-1].end_ns for row in (*self.events, *self.reductions) if row), default=0)

    @property
    def span_ns(self) -> int:
        """The longest time of a rank from the start of its first event to the end of its last."""
        return max((row[-1].end_ns - row[0].start_ns for row in self.events if row), default=0)

    @property
    def busy_ns(self) -> tuple[int, ...]:
        """The time that each rank spends in actions."""
        return tuple(sum(end - start for _, start, end in row) for row in self.events)

    @property
    def bubble(self) -> float:
        """1 − mean busy time / makespan."""
        if not self.makespan_ns:
            return 0.0
        # GPipe with 4 ranks, 4 microbatches, F of 1 and B of 2: each rank is busy for 12 of 21, so
        # the bubble is 1 − 12 / 21 = 3 / 7, which is (k − 1) / (M + k − 1).
        return 1 - sum(self.busy_ns) / (len(self.events) * self.makespan_ns)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes that each rank holds."""
        return tuple(max(row, default=0) for row in self.held_bytes)

    def memory(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (time in ns, bytes held from then on) of a rank.

        An action that takes bytes does so when it starts, one that frees bytes when it ends.
        """
        before, curve = 0, []
        for event, held in zip(self.events[rank], self.held_bytes[rank], strict=True):
            curve.append((event.start_ns if held > before else event.end_ns, held))
            before = held
        return tuple(curve)
