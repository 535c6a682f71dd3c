"""Schedules: which rank does what, in which order. Pure values, no PyTorch.

An action is written as torch.distributed.pipelining writes it, `<stage><KIND><microbatch>`:

    0F2        forward of microbatch 2 in stage 0           1SEND_F2   send its outputs to stage 2
    0B2        its full backward                            1RECV_F2   receive stage 0's outputs
    0I2, 0W2   gradients of inputs, then of weights         1SEND_B2   send input gradients to stage 0
    0R2        the forward once more, before the backward   1RECV_B2   receive stage 2's gradients
    0REDUCE_GRAD  finish the gradients of stage 0: sum over the ranks that hold them, divide by M

torch has no words for two things: `0STEP` is the optimizer's step of stage 0 (`0STEP2`: after microbatch 2), and a
version of the weights is written behind, `0F2@1`. Schedules that update weights once, at the end, name no versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Literal, NamedTuple

from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = [
    "BACKWARDS",
    "COMPUTE",
    "WEIGHT_GRADIENT_KINDS",
    "TRANSFERS",
    "Action",
    "CriticalEvent",
    "Event",
    "Idle",
    "Kind",
    "Schedule",
    "Timeline",
    "WeightVersions",
    "StartReason",
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

    __hash__ = (
        str.__hash__
    )  # that of Enum runs in Python, and schedules hash actions by the hundred thousand


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
COMPUTE = frozenset(
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD, Kind.RECOMPUTE}
)
WEIGHT_GRADIENT_KINDS = frozenset(
    {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
)  # what adds to a stage's gradients
TRANSFERS = frozenset(
    {Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD}
)
_NUMBER = r"0|[1-9][0-9]*"
_PATTERN = re.compile(
    rf"({_NUMBER})(REDUCE_GRAD|STEP|SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B|R)({_NUMBER}|)(?:@({_NUMBER}))?"
)


WeightVersions = Literal["synchronous", "stashed", "vertical-sync", "double-buffered"]


class Action(NamedTuple):
    """One step of one rank. `microbatch` is None for what covers all of them; `version` is that of the weights."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    version: int | None = None

    @staticmethod
    @cache
    def parse(text: str) -> Action:
        """Reads torch's notation; ValueError says what is wrong with `text`."""
        match = _PATTERN.fullmatch(text)
        if match is None or (
            match[2] != "STEP" and (match[2] == "REDUCE_GRAD") != (match[3] == "")
        ):
            raise ValueError(
                f"{text!r} is not an action such as '0F2', '1SEND_B0', '0REDUCE_GRAD' or '0F2@1'"
            )
        microbatch, version = (
            None if digits in ("", None) else int(digits) for digits in match.group(3, 4)
        )
        return Action(int(match[1]), Kind(match[2]), microbatch, version)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}{'' if self.version is None else f'@{self.version}'}"


class Schedule(Value, frozen=True, kw_only=True, dict=True):
    """Per rank the actions in the order in which it performs them; `placement[stage]` is the stage's rank.

    `weight_versions` says which weights a microbatch sees. synchronous: those of the step. stashed: each stage's
    latest, again in the backward (PipeDream). vertical-sync: on all stages those that the first one had (PipeDream,
    section 3.3). double-buffered: those of the last but one update (PipeDream-2BW).
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
        for rank, action in self:
            if action.stage >= len(self.placement) or self.placement[action.stage] != rank:
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
        """The actions of each rank that occupy it: no transfers, no reductions."""
        return tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.rows)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.actions)

    def first(self, microbatches: int) -> Schedule:
        """The same order without the later microbatches; nothing that stays depends on them."""
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
        """A schedule from parsed actions."""
        actions = tuple(tuple(map(str, row)) for row in rows)
        return Schedule(
            name=name,
            weight_versions=weight_versions,
            microbatches=microbatches,
            placement=tuple(placement),
            actions=actions,
        )


class Event(NamedTuple):
    """An action as it happened on its rank, in nanoseconds since the step began."""

    action: Action
    start_ns: int
    end_ns: int


StartReason = Literal["start", "rank", "send", "dependency", "transfer", "queue", "reduction"]


class CriticalEvent(NamedTuple):
    """An event on the path, and why it does not begin earlier.

    start: nothing is before it. rank: its rank has just ended the event before it on the path. send: and has then
    sent what that made, and blocked. dependency: its input is made just then, on another rank or on its own. transfer:
    its input arrives just then. queue: it arrives just then, behind others on the same link; the event before it on
    the path made the first of them. reduction: it is the sum that the event before it completes or comes before.
    """

    rank: int
    event: Event
    why: StartReason


class Idle(Value, frozen=True, kw_only=True):
    """How long a rank computed nothing, by cause; with its busy time they add up to the makespan.

    transfer: what messages that take no time would save of each wait, sends that block the rank, and reductions after
    its last action. memory: a forward had all its inputs, but its bytes would have been over the rank's cap.
    imbalance: of the other waits what no order can remove, since another rank has more to do. dependency: the rest.
    """

    dependency_ns: NonNegative
    transfer_ns: NonNegative
    memory_ns: NonNegative = 0
    imbalance_ns: NonNegative = 0

    @property
    def total_ns(self) -> int:
        """All causes together."""
        return self.dependency_ns + self.transfer_ns + self.memory_ns + self.imbalance_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step, per rank: the compute events in order, why it idled, and the bytes held after each event.

    `reductions` are the data-parallel sums of a rank's stages, beside its compute events.
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
        """The largest time that a rank takes from the start of its first event to the end of its last."""
        return max((row[-1].end_ns - row[0].start_ns for row in self.events if row), default=0)

    @property
    def busy_ns(self) -> tuple[int, ...]:
        """Per rank, the time spent in actions."""
        return tuple(sum(end - start for _, start, end in row) for row in self.events)

    @property
    def bubble(self) -> float:
        """1 − mean busy time / makespan."""
        if not self.makespan_ns:
            return 0.0
        return 1 - sum(self.busy_ns) / (len(self.events) * self.makespan_ns)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank, the most that it holds."""
        return tuple(max(row, default=0) for row in self.held_bytes)

    def memory(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(time in ns, bytes held from then on): from the start of an action that takes, the end of one that frees."""
        before, curve = 0, []
        for event, held in zip(self.events[rank], self.held_bytes[rank], strict=True):
            curve.append((event.start_ns if held > before else event.end_ns, held))
            before = held
        return tuple(curve)
