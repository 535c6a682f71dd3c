"""A schedule problem as integers, for the searches: an action is a number, an order a list of numbers per rank.

The backward of a microbatch in a stage is one operation, BACKWARD, which releases the stage before; where the backward
is split it takes the time of the input gradients, and a second operation, WEIGHT, follows. Operations of one stage
and kind are interchangeable, so they happen in the order of the microbatches: nothing is lost by it, and gradients
are summed in the order of the unsplit run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["BACKWARD", "FORWARD", "RECOMPUTE", "WEIGHT", "ScheduleInstance", "Rows", "OrderTimes"]

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = range(4)
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """When each operation ends in an order performed as early as possible, and the objective's value, in ns."""

    ends: list[int]
    makespan_ns: int
    span_ns: int


@dataclass(frozen=True)
class ScheduleInstance:
    """`problem` with every backward in two halves, or none, stage by stage: `split[s]`."""

    problem: PlacedProblem
    split: tuple[bool, ...]

    def operation(self, kind: int, stage: int, microbatch: int) -> int:
        """Its number."""
        return (kind * self.problem.stages + stage) * self.problem.microbatches + microbatch

    def decode(self, operation: int) -> tuple[int, int, int]:
        """Kind, stage and microbatch of a number."""
        lane, microbatch = divmod(operation, self.problem.microbatches)
        kind, stage = divmod(lane, self.problem.stages)
        return kind, stage, microbatch

    @property
    def code_count(self) -> int:
        """One more than the largest number."""
        return 4 * self.problem.stages * self.problem.microbatches

    @property
    def operation_count(self) -> int:
        """How many there are in an order."""
        return sum(map(len, self.kinds)) * self.problem.microbatches

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Per stage the kinds of operations it has, in the order in which a microbatch needs them."""
        return tuple(
            (FORWARD, *[RECOMPUTE] * costs.recompute, BACKWARD, *[WEIGHT] * split)
            for costs, split in zip(self.problem.costs, self.split, strict=True)
        )

    @cached_property
    def task_ns(self) -> tuple[tuple[int, ...], ...]:
        """Per kind and stage how long an operation takes."""
        costs, split = self.problem.costs, self.split
        backward = [
            w.backward_input_ns if s else w.backward_ns for w, s in zip(costs, split, strict=True)
        ]
        weight = [w.backward_weight_ns if s else 0 for w, s in zip(costs, split, strict=True)]
        return (
            tuple(w.forward_ns for w in costs),
            tuple(backward),
            tuple(weight),
            tuple(w.recompute_ns if w.recompute else 0 for w in costs),
        )

    @cached_property
    def task_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Per kind and stage what an operation adds to the bytes that its rank holds."""
        change, stages = self.problem.change_bytes, range(self.problem.stages)
        backward = [Kind.BACKWARD_INPUT if split else Kind.BACKWARD for split in self.split]
        return (
            tuple(change(Action(s, Kind.FORWARD)) for s in stages),
            tuple(change(Action(s, backward[s])) for s in stages),
            tuple(change(Action(s, Kind.BACKWARD_WEIGHT)) if self.split[s] else 0 for s in stages),
            tuple(
                change(Action(s, Kind.RECOMPUTE)) if self.problem.costs[s].recompute else 0
                for s in stages
            ),
        )

    @cached_property
    def task_inputs(self) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]:
        """Per kind and stage the operations on other ranks that it waits for: (kind, stage, time of the message).

        What it waits for on its own rank is here too, unless it is the same stage's: a row always has that before.
        """
        problem, stages = self.problem, self.problem.stages
        forward: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
        backward: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
        for stage in range(stages - 1):
            forward[stage + 1].append((FORWARD, stage, problem.forward_transfer_ns[stage]))
            if problem.gradient[stage]:
                backward[stage].append((BACKWARD, stage + 1, problem.backward_transfer_ns[stage]))
        for skip in problem.skips:
            forward[skip.destination].append((FORWARD, skip.source, skip.forward_ns))
            backward[skip.source].append((BACKWARD, skip.destination, skip.backward_ns))
        nothing = ((),) * stages
        return tuple(map(tuple, forward)), tuple(map(tuple, backward)), nothing, nothing

    @cached_property
    def durations(self) -> list[int]:
        """By operation."""
        repeat = range(self.problem.microbatches)
        return [time for lanes in self.task_ns for time in lanes for _ in repeat]

    @cached_property
    def sources(self) -> list[tuple[tuple[int, int], ...]]:
        """By operation what it waits for besides its own row: (operation, time of the message)."""
        return [
            tuple((self.operation(kind, source, microbatch), hop) for kind, source, hop in waits)
            for lanes in self.task_inputs
            for waits in lanes
            for microbatch in range(self.problem.microbatches)
        ]

    @cached_property
    def byte_changes(self) -> list[int]:
        """By operation what it adds to the bytes its rank holds."""
        repeat = range(self.problem.microbatches)
        return [size for lanes in self.task_bytes for size in lanes for _ in repeat]

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        placement = self.problem.placement
        return tuple(
            tuple(s for s, at in enumerate(placement) if at == rank)
            for rank in range(self.problem.ranks)
        )

    @cached_property
    def gradient_reach(self) -> tuple[int, ...]:
        """Per stage the last one from which gradients flow back to it, from stage to stage."""
        gradient_reach = list(range(self.problem.stages))
        for stage in reversed(gradient_reach[:-1]):
            if self.problem.gradient[stage]:
                gradient_reach[stage] = gradient_reach[stage + 1]
        return tuple(gradient_reach)

    def times(self, rows: Sequence[Sequence[int]]) -> OrderTimes | None:
        """The order performed as early as possible on links that are free and do not block; None if it deadlocks."""
        durations, sources = self.durations, self.sources
        ends = [-1] * self.code_count
        free, heads, lengths = [0] * len(rows), [0] * len(rows), [len(row) for row in rows]
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row, clock, head, length = rows[rank], free[rank], heads[rank], lengths[rank]
            while head < length:
                operation = row[head]
                for source, hop in sources[operation]:
                    end = ends[source]
                    if end < 0:
                        waiting.setdefault(source, []).append(rank)
                        break
                    if end + hop > clock:
                        clock = end + hop
                else:
                    clock += durations[operation]
                    ends[operation] = clock
                    head += 1
                    if operation in waiting:
                        ready += waiting.pop(operation)
                    continue
                break
            free[rank], heads[rank] = clock, head
        return None if heads != lengths else self._measured(rows, ends)

    def _measured(self, rows: Sequence[Sequence[int]], ends: list[int]) -> OrderTimes:
        filled = [row for row in rows if row]
        makespan = max((ends[row[-1]] for row in filled), default=0)
        spans = (ends[row[-1]] - ends[row[0]] + self.durations[row[0]] for row in filled)
        return OrderTimes(ends, max(makespan, self._reduced(rows, ends)), max(spans, default=0))

    def _reduced(self, rows: Sequence[Sequence[int]], ends: list[int]) -> int:
        """When the last data-parallel sum of gradients is done: each after its stage, one at a time on each rank."""
        if not any(costs.reduce_ns for costs in self.problem.costs):
            return 0
        last = self.problem.microbatches - 1
        done = [0] * len(rows)
        for rank, stages in enumerate(self.stages_by_rank):
            closing = [
                (ends[self.operation(WEIGHT if self.split[s] else BACKWARD, s, last)], s)
                for s in stages
            ]
            for end, stage in sorted(closing):
                reduce_ns = self.problem.costs[stage].reduce_ns
                done[rank] = max(done[rank], end) + reduce_ns if reduce_ns else done[rank]
        return max(done)

    def peak_bytes(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The most bytes that each rank holds; memory depends on a rank's own order alone."""
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
        """Whether every rank stays within its cap."""
        caps = self.problem.caps
        return caps is None or all(
            peak <= cap for peak, cap in zip(self.peak_bytes(rows), caps, strict=True)
        )

    def rows_of_schedule(self, schedule: Schedule) -> Rows:
        """The compute actions of a schedule as operations; where both halves are wanted, one follows the other."""
        return [[o for action in row for o in self._operations(action)] for row in schedule.compute]

    def _operations(self, action: Action) -> list[int]:
        stage, kind, microbatch, _ = action
        assert microbatch is not None
        number = self.operation(_KINDS[kind], stage, microbatch)
        if kind is Kind.BACKWARD and self.split[stage]:
            return [number, self.operation(WEIGHT, stage, microbatch)]
        return [] if kind is Kind.BACKWARD_WEIGHT and not self.split[stage] else [number]

    def to_schedule(self, name: str, rows: Sequence[Sequence[int]]) -> Schedule:
        """The order as a schedule of compute actions."""
        actions = [[self._action(operation) for operation in row] for row in rows]
        return Schedule.of(name, self.problem.microbatches, self.problem.placement, actions)

    def _action(self, operation: int) -> Action:
        kind, stage, microbatch = self.decode(operation)
        whole = kind == BACKWARD and not self.split[stage]
        return Action(stage, Kind.BACKWARD if whole else _NAMES[kind], microbatch)


_KINDS = {
    Kind.FORWARD: FORWARD,
    Kind.BACKWARD: BACKWARD,
    Kind.BACKWARD_INPUT: BACKWARD,
    Kind.BACKWARD_WEIGHT: WEIGHT,
    Kind.RECOMPUTE: RECOMPUTE,
}
_NAMES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
