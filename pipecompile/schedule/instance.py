"""A schedule problem as integers, for the searches.

An operation is a kind, a stage and a microbatch, as one number, its code; an order is a list of
codes for each rank. The backward of a microbatch in a stage is one operation, BACKWARD, for which
the stage before waits. Where the backward is split it takes the time of the input gradient, and a
second operation, WEIGHT, follows:

    full    FORWARD (RECOMPUTE) BACKWARD
    split   FORWARD (RECOMPUTE) BACKWARD WEIGHT

All microbatches of one kind and stage, a task, take the same time and bytes. Exchanging two of them
changes nothing, so the searches keep them in ascending order: nothing is lost by that, and
gradients are summed in the order of the unsplit run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["BACKWARD", "FORWARD", "RECOMPUTE", "WEIGHT", "OrderTimes", "Rows", "ScheduleInstance"]

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = range(4)
Rows = list[list[int]]
"""An order: for each rank the codes of its operations."""
TaskInputs = tuple[tuple[int, int, int], ...]
"""What a task waits for: (kind, stage, time of the message in ns)."""


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """When each operation ends in an order without needless waits, and the objectives, in ns."""

    ends: list[int]
    makespan_ns: int
    span_ns: int


@dataclass(frozen=True)
class ScheduleInstance:
    """A problem in which stage s has all its backwards split, or none: `split[s]`."""

    problem: PlacedProblem
    split: tuple[bool, ...]

    def operation(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the code of an operation."""
        # With 2 stages and 3 microbatches 0F0 0F1 0F2 1F0 1F1 1F2 0B0
        # … are 0 1 2 3 4 5 6 …, so that the lists by operation below
        # need no dictionary, and neighbours in a task differ by one.
        return (kind * self.problem.stages + stage) * self.problem.microbatches + microbatch

    def decode(self, operation: int) -> tuple[int, int, int]:
        """Return kind, stage and microbatch of a code."""
        task, microbatch = divmod(operation, self.problem.microbatches)
        kind, stage = divmod(task, self.problem.stages)
        return kind, stage, microbatch

    @property
    def code_count(self) -> int:
        """One more than the largest code; not all codes are operations of the instance."""
        return 4 * self.problem.stages * self.problem.microbatches

    @property
    def operation_count(self) -> int:
        """The number of operations in an order."""
        return sum(map(len, self.kinds)) * self.problem.microbatches

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of operations of each stage, in the order in which a microbatch has them."""
        return tuple(
            (FORWARD, *[RECOMPUTE] * costs.recompute, BACKWARD, *[WEIGHT] * split)
            for costs, split in zip(self.problem.costs, self.split, strict=True)
        )

    @cached_property
    def task_ns(self) -> tuple[tuple[int, ...], ...]:
        """How long an operation takes, by kind and stage."""
        costs, split = self.problem.costs, self.split
        backward = [
            stage.backward_input_ns if is_split else stage.backward_ns
            for stage, is_split in zip(costs, split, strict=True)
        ]
        weight = [
            stage.backward_weight_ns if is_split else 0
            for stage, is_split in zip(costs, split, strict=True)
        ]
        return (
            tuple(stage.forward_ns for stage in costs),
            tuple(backward),
            tuple(weight),
            tuple(stage.recompute_ns if stage.recompute else 0 for stage in costs),
        )

    @cached_property
    def task_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The bytes that an operation adds to what its rank holds, by kind and stage."""
        change_bytes = self.problem.change_bytes
        sizes: list[list[int]] = [[], [], [], []]
        for stage, split in enumerate(self.split):
            backward = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
            weight = change_bytes(Action(stage, Kind.BACKWARD_WEIGHT)) if split else 0
            recompute = change_bytes(Action(stage, Kind.RECOMPUTE))
            sizes[FORWARD].append(change_bytes(Action(stage, Kind.FORWARD)))
            sizes[BACKWARD].append(change_bytes(Action(stage, backward)))
            sizes[WEIGHT].append(weight)
            sizes[RECOMPUTE].append(recompute if self.problem.costs[stage].recompute else 0)
        return tuple(map(tuple, sizes))

    @cached_property
    def task_inputs(self) -> tuple[tuple[TaskInputs, ...], ...]:
        """What an operation waits for in other stages for its microbatch, by kind and stage.

        What it waits for in its own stage is left out: a row always has that before it.
        """
        problem, stages = self.problem, self.problem.stages
        forward: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
        backward: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
        for stage in range(stages - 1):
            forward[stage + 1].append((FORWARD, stage, problem.forward_transfer_ns[stage]))
            if problem.gradient[stage]:
                backward[stage].append((BACKWARD, stage + 1, problem.backward_transfer_ns[stage]))
        # A tensor that skips stages goes forward, and its gradient goes back.
        for skip in problem.skips:
            forward[skip.destination].append((FORWARD, skip.source, skip.forward_ns))
            backward[skip.source].append((BACKWARD, skip.destination, skip.backward_ns))
        # Weight backwards and recomputes wait for their own stage only.
        nothing: tuple[TaskInputs, ...] = ((),) * stages
        return tuple(map(tuple, forward)), tuple(map(tuple, backward)), nothing, nothing

    @cached_property
    def durations(self) -> list[int]:
        """How long each operation takes, in ns."""
        repeat = range(self.problem.microbatches)
        return [time for times in self.task_ns for time in times for _ in repeat]

    @cached_property
    def sources(self) -> list[tuple[tuple[int, int], ...]]:
        """What each operation waits for in other stages: (operation, time of the message)."""
        sources = []
        for by_stage in self.task_inputs:
            for inputs in by_stage:
                for microbatch in range(self.problem.microbatches):
                    waits = [
                        (self.operation(kind, stage, microbatch), transfer_ns)
                        for kind, stage, transfer_ns in inputs
                    ]
                    sources.append(tuple(waits))
        return sources

    @cached_property
    def byte_changes(self) -> list[int]:
        """The bytes that each operation adds to what its rank holds."""
        repeat = range(self.problem.microbatches)
        return [size for sizes in self.task_bytes for size in sizes for _ in repeat]

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        stages: list[list[int]] = [[] for _ in range(self.problem.ranks)]
        for stage, rank in enumerate(self.problem.placement):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def gradient_reach(self) -> tuple[int, ...]:
        """The last stage from which gradients flow back to each stage, stage by stage."""
        # Four stages, no gradient over the boundary behind stage 1: 1 1 3 3.
        reach = list(range(self.problem.stages))
        for stage in reversed(reach[:-1]):
            if self.problem.gradient[stage]:
                reach[stage] = reach[stage + 1]
        return tuple(reach)

    def times(self, rows: Sequence[Sequence[int]]) -> OrderTimes | None:
        """Return the times of an order without needless waits; None if it deadlocks.

        Links are free for every message and do not block their sender. The searches call this for
        every order that they look at, so it runs each row until an input is missing and comes back
        when that is there: linear in the number of operations.
        """
        durations, sources = self.durations, self.sources
        # An end below zero says that the operation has not run yet.
        ends = [-1] * self.code_count
        free, heads, lengths = [0] * len(rows), [0] * len(rows), [len(row) for row in rows]
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(rows)))
        # Which rank goes on first does not matter: what an operation waits for is
        # fixed by the rows, so that every order of evaluation gives the same ends.
        while ready:
            rank = ready.pop()
            row, clock, head, length = rows[rank], free[rank], heads[rank], lengths[rank]
            while head < length:
                operation = row[head]
                # The `else` of this loop runs when no input is missing. The `break` behind it
                # leaves the row where an input is, and its clock may have moved on to an input that
                # is there. That does no harm: the operation cannot begin before that one either.
                for source, transfer_ns in sources[operation]:
                    end = ends[source]
                    if end < 0:
                        # The rank comes back here when the source has run.
                        waiting.setdefault(source, []).append(rank)
                        break
                    if end + transfer_ns > clock:
                        clock = end + transfer_ns
                else:
                    clock += durations[operation]
                    ends[operation] = clock
                    head += 1
                    if operation in waiting:
                        ready += waiting.pop(operation)
                    continue
                break
            free[rank], heads[rank] = clock, head
        return None if heads != lengths else self._order_times(rows, ends)

    def _order_times(self, rows: Sequence[Sequence[int]], ends: list[int]) -> OrderTimes:
        busy = [row for row in rows if row]
        makespan_ns = max((ends[row[-1]] for row in busy), default=0)
        spans = (ends[row[-1]] - ends[row[0]] + self.durations[row[0]] for row in busy)
        makespan_ns = max(makespan_ns, self._reductions_end_ns(rows, ends))
        return OrderTimes(ends, makespan_ns, max(spans, default=0))

    def _reductions_end_ns(self, rows: Sequence[Sequence[int]], ends: list[int]) -> int:
        """Return when the last sum over replicas is done.

        A sum follows its stage's last gradient; those of one rank run one at a time.
        """
        if not any(costs.reduce_ns for costs in self.problem.costs):
            return 0
        last = self.problem.microbatches - 1
        done = [0] * len(rows)
        for rank, stages in enumerate(self.stages_by_rank):
            gradients = []
            for stage in stages:
                kind = WEIGHT if self.split[stage] else BACKWARD
                gradients.append((ends[self.operation(kind, stage, last)], stage))
            # The stage that is complete first is summed first.
            for end, stage in sorted(gradients):
                reduce_ns = self.problem.costs[stage].reduce_ns
                if reduce_ns:
                    done[rank] = max(done[rank], end) + reduce_ns
        return max(done)

    def peak_bytes(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Return the most bytes that each rank holds; they follow from its own order alone."""
        changes, peaks = self.byte_changes, []
        for row in rows:
            held = peak = 0
            for operation in row:
                held += changes[operation]
                if held > peak:
                    peak = held
            peaks.append(peak)
        return peaks

    def fits(self, rows: Sequence[Sequence[int]]) -> bool:
        """Return whether every rank stays within its cap."""
        caps = self.problem.caps
        return caps is None or all(
            peak <= cap for peak, cap in zip(self.peak_bytes(rows), caps, strict=True)
        )

    def rows_of_schedule(self, schedule: Schedule) -> Rows:
        """Return the compute actions of a schedule as operations.

        Where this instance splits a full backward, its weight backward follows at once.
        """
        return [
            [operation for action in row for operation in self._operations(action)]
            for row in schedule.compute
        ]

    def _operations(self, action: Action) -> list[int]:
        stage, kind, microbatch, _ = action
        assert microbatch is not None
        operation = self.operation(_OPERATION_KINDS[kind], stage, microbatch)
        # Named schedules of whole backwards are seeds of an instance
        # that splits them, which the search then improves by moving W.
        if kind is Kind.BACKWARD and self.split[stage]:
            return [operation, self.operation(WEIGHT, stage, microbatch)]
        # Where this instance does not split, the other half counts as the full backward.
        return [] if kind is Kind.BACKWARD_WEIGHT and not self.split[stage] else [operation]

    def to_schedule(self, name: str, rows: Sequence[Sequence[int]]) -> Schedule:
        """Return an order as a schedule of compute actions."""
        actions = [[self._action(operation) for operation in row] for row in rows]
        return Schedule.of(name, self.problem.microbatches, self.problem.placement, actions)

    def _action(self, operation: int) -> Action:
        kind, stage, microbatch = self.decode(operation)
        is_full = kind == BACKWARD and not self.split[stage]
        return Action(stage, Kind.BACKWARD if is_full else _ACTION_KINDS[kind], microbatch)


_OPERATION_KINDS = {
    Kind.FORWARD: FORWARD,
    Kind.BACKWARD: BACKWARD,
    Kind.BACKWARD_INPUT: BACKWARD,
    Kind.BACKWARD_WEIGHT: WEIGHT,
    Kind.RECOMPUTE: RECOMPUTE,
}
_ACTION_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
