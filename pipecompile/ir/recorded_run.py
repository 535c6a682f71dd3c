"""Recorded runs: when the actions of some training steps happened on each rank.

`Pipeline.record()` makes one, and `pipecompile compare` holds it against the plan. These are values
without PyTorch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipecompile.ir.schedule import COMPUTE, Action, Event, Kind, Timeline
from pipecompile.ir.serialization import FileValue, NonNegative, Positive, Value

__all__ = ["RecordedAction", "RecordedRank", "RecordedRun", "RecordedStep"]

_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


class RecordedAction(NamedTuple):
    """One action of a rank, in nanoseconds since the first rank began the step.

    From `start_ns` to `ready_ns` it waited for a message, and the first message of a rank for all
    ranks to enter the step; until `end_ns` it worked. `bytes` are those of the message that it
    sends or receives. `peak_bytes` is the most that the allocator had given out while it worked,
    None on a CPU, where that is not known.
    """

    # The life of an action that needs a message, 0B0 of rank 0:
    #
    #     start ──── waits for the gradient ──── ready ──── works ──── end
    #
    action: str
    start_ns: NonNegative
    ready_ns: NonNegative
    end_ns: NonNegative
    bytes: NonNegative = 0
    peak_bytes: NonNegative | None = None

    @property
    def waiting_ns(self) -> int:
        """How long it waited for a message."""
        return self.ready_ns - self.start_ns

    @property
    def work_ns(self) -> int:
        """How long it took from then on."""
        return self.end_ns - self.ready_ns


class RecordedRank(Value, frozen=True, kw_only=True):
    """What one rank did in a step: its actions in order, and when it entered and left the step."""

    start_ns: NonNegative
    end_ns: NonNegative
    actions: tuple[RecordedAction, ...]

    def __post_init__(self) -> None:
        for recorded in self.actions:
            Action.parse(recorded.action)
            # start, ready and end, which a RecordedAction has in places 1 to 3.
            moments = self.start_ns, *recorded[1:4], self.end_ns
            if list(moments) != sorted(moments):
                raise ValueError(f"the times of {recorded.action} are not in order: {moments}")

    @property
    def waiting_ns(self) -> int:
        """How long it waited for messages."""
        return sum(recorded.waiting_ns for recorded in self.actions)

    @property
    def peak_bytes(self) -> int | None:
        """The most that its allocator had given out; None if that was not recorded."""
        peaks = [a.peak_bytes for a in self.actions if a.peak_bytes is not None]
        return max(peaks, default=None)

    @property
    def events(self) -> tuple[Event, ...]:
        """Its compute actions, each from the moment when it no longer waited.

        What an action sends right behind it keeps the rank busy too: as in the simulator, that is a
        part of the action.
        """
        events: list[Event] = []
        for recorded in self.actions:
            action = Action.parse(recorded.action)
            if action.kind in COMPUTE:
                events.append(Event(action, recorded.ready_ns, recorded.end_ns))
            elif action.kind in _SENDS and events:
                # 0F0 from 10 to 30 and 0SEND_F0 from 30 to 32 are one event from 10 to 32.
                events[-1] = events[-1]._replace(end_ns=recorded.end_ns)
        return tuple(events)


class RecordedStep(Value, frozen=True, kw_only=True):
    """One training step, the `number`th of its pipeline, on all ranks.

    `microbatch_shapes` are those of the model's input tensors in the first microbatch.
    """

    number: NonNegative
    microbatches: Positive
    microbatch_shapes: tuple[tuple[NonNegative, ...], ...]
    ranks: tuple[RecordedRank, ...]

    @property
    def ns(self) -> int:
        """From the first action that could begin to the last rank's exit.

        A rank may enter a step while others end the one before: until all have, it waits.
        """
        # A rank that is early waits in its first action for the others: that belongs to the step
        # before.
        begins = (
            rank.actions[0].ready_ns if rank.actions else rank.start_ns for rank in self.ranks
        )
        return max(rank.end_ns for rank in self.ranks) - min(begins)

    def timeline(self) -> Timeline:
        """Return the step as the simulator returns one, so that it is drawn in the same way.

        What follows a rank's last action (the rest of the sums over ranks, the division of
        gradients) is drawn as a reduction. Why a rank idled is not known, so `idle` is empty.
        """
        rows = tuple(rank.events for rank in self.ranks)
        ends = tuple(
            (Event(Action(row[-1].action.stage, Kind.REDUCE), row[-1].end_ns, rank.end_ns),)
            if row
            else ()
            for row, rank in zip(rows, self.ranks, strict=True)
        )
        return Timeline(rows, (), (), ends)


class RecordedRun(FileValue, frozen=True, kw_only=True):
    """Some training steps of one pipeline.

    `plan` is the fingerprint of the whole plan that was run. With fewer `processes` than ranks, one
    process performed the actions of all ranks in turns. Moments of different ranks may be off by
    `clock_error_ns`; times within a rank do not depend on that.
    """

    schema: Literal["pipecompile/run/1"] = "pipecompile/run/1"
    plan: str
    device: str
    torch: str
    processes: Positive
    clock_error_ns: NonNegative
    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        counts = {len(step.ranks) for step in self.steps}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"a run needs steps, all on the same ranks, but it has {len(self.steps)} steps on "
                f"{sorted(counts)} ranks"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.steps[0].ranks)

    @property
    def is_in_turns(self) -> bool:
        """Whether one process performed the actions of several ranks."""
        # Then moments say nothing about ranks that work at the same time: only times of actions
        # do.
        return self.processes < self.ranks
