"""Large neighbourhoods: all that starts within a window of time is ordered anew, by CP-SAT; the rest stays.

What comes before keeps its times. What comes after keeps its order, so it counts by its tail: how long, at least, the
step goes on after an operation's end. The makespan is then the largest end + tail in the window, or what it is
without the window. Memory is a cumulative resource over the lifetimes from forward to backward and on to the weight
gradients; as a reservoir of changes CP-SAT found nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from pipecompile.schedule.instance import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHT,
    OrderTimes,
    Rows,
    ScheduleInstance,
)

__all__ = ["Window", "window_between", "improve_window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Per rank the half-open part of its row that may be reordered."""

    parts: tuple[tuple[int, int], ...]

    @property
    def operation_count(self) -> int:
        """How many operations."""
        return sum(stop - start for start, stop in self.parts)


def window_between(
    instance: ScheduleInstance, rows: Rows, ends: list[int], start_ns: int, stop_ns: int
) -> Window:
    """The operations that start in [start_ns, stop_ns)."""
    parts = []
    for row in rows:
        starts = [ends[operation] - instance.durations[operation] for operation in row]
        first = sum(start < start_ns for start in starts)
        parts.append((first, first + sum(start_ns <= start < stop_ns for start in starts)))
    return Window(tuple(parts))


def improve_window(
    instance: ScheduleInstance,
    rows: Rows,
    times: OrderTimes,
    window: Window,
    *,
    effort: float,
    seed: int,
) -> tuple[Rows | None, float]:
    """An order that computes no longer, if one is found, and the work that took, in CP-SAT's deterministic time."""
    if window.operation_count < 2:
        return None, 0.0
    return _Neighbourhood(instance, rows, times, window).solve(effort, seed)


class _Neighbourhood:
    """The model of a window: when each of its operations starts, counted from the first."""

    def __init__(
        self, instance: ScheduleInstance, rows: Rows, times: OrderTimes, window: Window
    ) -> None:
        self.instance, self.rows, self.window, self.ends = instance, rows, window, times.ends
        self.durations = instance.durations
        self.free = [row[first:stop] for row, (first, stop) in zip(rows, window.parts, strict=True)]
        members = [operation for row in self.free for operation in row]
        self.origin = min(times.ends[o] - self.durations[o] for o in members)
        self.horizon = times.makespan_ns - self.origin
        self.model = cp_model.CpModel()
        self.starts = {
            o: self.model.new_int_var(0, self.horizon - self.durations[o], "") for o in members
        }
        self._one_at_a_time()
        self._after_what_is_needed()
        self._within_caps()
        self._minimise()

    def _one_at_a_time(self) -> None:
        model, before = self.model, dict[int, int]()
        for row, (first, _), free in zip(self.rows, self.window.parts, self.free, strict=True):
            model.add_no_overlap(
                [
                    model.new_fixed_size_interval_var(self.starts[o], self.durations[o], "")
                    for o in free
                ]
            )
            for operation in free:
                if first:
                    self._follows(operation, row[first - 1])
                lane = operation // self.instance.problem.microbatches
                if lane in before:
                    self._follows(operation, before[lane])
                before[lane] = operation

    def _after_what_is_needed(self) -> None:
        for operation in self.starts:
            for source, hop in self.instance.sources[operation]:
                self._follows(operation, source, hop)
            for source in self._of_its_stage(operation):
                self._follows(operation, source)

    def _of_its_stage(self, operation: int) -> Iterator[int]:
        kind, stage, microbatch = self.instance.decode(operation)
        kinds = self.instance.kinds[stage]
        index = kinds.index(kind)
        if index:
            yield self.instance.operation(kinds[index - 1], stage, microbatch)

    def _follows(self, operation: int, source: int, hop: int = 0) -> None:
        if source in self.starts:
            self.model.add(
                self.starts[operation] >= self.starts[source] + self.durations[source] + hop
            )
        elif self.ends[source] + hop > self.origin:
            self.model.add(self.starts[operation] >= self.ends[source] + hop - self.origin)

    def _within_caps(self) -> None:
        caps = self.instance.problem.caps
        for rank, (row, (first, _)) in enumerate(zip(self.rows, self.window.parts, strict=True)):
            if caps is not None:
                held = sum(self.instance.byte_changes[operation] for operation in row[:first])
                self._within(caps[rank] - held, self.free[rank])

    def _within(self, room: int, free: list[int]) -> None:
        """What is held in the window: `room` is what there is besides all that is held as it begins."""
        intervals, demands = [], []
        for first, last, size in self._lifetimes(free):
            if first not in self.starts:
                room += size  # held from the beginning on; counted below while it lasts
            start = self.starts.get(first, 0)
            end = self.starts[last] + self.durations[last] if last in self.starts else self.horizon
            length = self.model.new_int_var(0, self.horizon, "")
            intervals.append(self.model.new_interval_var(start, length, end, ""))
            demands.append(size)
        if sum(demands) > room:
            self.model.add_cumulative(intervals, demands, room)

    def _lifetimes(self, free: list[int]) -> Iterator[tuple[int, int, int]]:
        """What takes bytes, what frees them, and how many, wherever one of both is in the window."""
        operation, lanes = self.instance.operation, self.instance.task_bytes
        touched = {self.instance.decode(o)[1:]: None for o in free}
        for stage, microbatch in touched:
            between = -lanes[WEIGHT][stage]
            spans = (
                (FORWARD, BACKWARD, -lanes[BACKWARD][stage] - lanes[RECOMPUTE][stage]),
                (RECOMPUTE, BACKWARD, lanes[RECOMPUTE][stage]),
                (FORWARD, WEIGHT, between),
            )
            for kinds in spans:
                first, last = (operation(kind, stage, microbatch) for kind in kinds[:2])
                if kinds[2] and (first in self.starts or last in self.starts):
                    yield first, last, kinds[2]

    def _minimise(self) -> None:
        model, tails = self.model, self._tails
        makespan = model.new_int_var(0, self.horizon, "")
        for operation, start in self.starts.items():
            model.add(makespan >= start + self.durations[operation] + tails[operation])
            model.add_hint(start, self.ends[operation] - self.durations[operation] - self.origin)
        model.minimize(makespan)

    @cached_property
    def _tails(self) -> list[int]:
        """By operation the longest chain that must follow it outside the window, in ns.

        Backwards in time; what lies in the window hands nothing on, since its order is not known yet.
        """
        found = [0] * self.instance.code_count
        before = {later: earlier for row in self.rows for earlier, later in pairwise(row)}
        outside = [
            o
            for row, (_, stop) in zip(self.rows, self.window.parts, strict=True)
            for o in row[stop:]
        ]
        for operation in sorted(outside, key=self._moment, reverse=True):
            length = found[operation] + self.durations[operation]
            earlier = before.get(operation)
            if earlier is not None and earlier not in self.starts:
                found[earlier] = max(found[earlier], length)
            for source, hop in self.instance.sources[operation]:
                found[source] = max(found[source], length + hop)
        for row, (_, stop), free in zip(self.rows, self.window.parts, self.free, strict=True):
            if stop < len(row):
                length = found[row[stop]] + self.durations[row[stop]]
                for operation in free:
                    found[operation] = max(found[operation], length)
        return found

    def _moment(self, operation: int) -> tuple[int, int]:
        return self.ends[operation], self.ends[operation] - self.durations[operation]

    def solve(self, effort: float, seed: int) -> tuple[Rows | None, float]:
        """The rows with the window in the order found."""
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = effort
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        found = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        spent = solver.response_proto.deterministic_time
        return (self._reordered(solver) if found else None), spent

    def _reordered(self, solver: cp_model.CpSolver) -> Rows:
        def moment(operation: int) -> tuple[int, int]:
            start = solver.value(self.starts[operation])
            return start, start + self.durations[operation]

        return [
            [*row[:first], *sorted(free, key=moment), *row[stop:]]
            for row, (first, stop), free in zip(
                self.rows, self.window.parts, self.free, strict=True
            )
        ]
