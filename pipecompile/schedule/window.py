"""Large neighbourhoods: CP-SAT reorders all that starts within a window of time; the rest stays.

             before        window            after
    rank 0   F0 F1 F2 │ B0 F3 B1 W0 F4 │ B2 ...
    rank 1   F0 F1 B0 │ W0 F2 B1 F3    │ B2 ...
             times stay    reordered         order stays

What comes after the window counts by tails: how long the step goes on at least after an operation's
end. The makespan is then the largest end + tail in the window, unless what lies outside decides it.
Memory is a cumulative resource over intervals: from forward to backward, and on to the weight
backward. (Stated as a reservoir of changes, CP-SAT found nothing.)
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

__all__ = ["Window", "improve_window", "window_between"]


@dataclass(frozen=True, slots=True)
class Window:
    """For each rank the half-open range of its row that may be reordered."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def operation_count(self) -> int:
        """The number of operations in the window."""
        return sum(stop - start for start, stop in self.ranges)


def window_between(
    instance: ScheduleInstance, rows: Rows, ends: list[int], start_ns: int, stop_ns: int
) -> Window:
    """Return the operations that start in [start_ns, stop_ns)."""
    ranges = []
    for row in rows:
        starts = [ends[operation] - instance.durations[operation] for operation in row]
        first = sum(start < start_ns for start in starts)
        ranges.append((first, first + sum(start_ns <= start < stop_ns for start in starts)))
    return Window(tuple(ranges))


def improve_window(
    instance: ScheduleInstance,
    rows: Rows,
    times: OrderTimes,
    window: Window,
    *,
    effort: float,
    seed: int,
) -> tuple[Rows | None, float]:
    """Return an order that is no longer, None if none is found, and the effort that this took.

    Effort is CP-SAT's deterministic time.
    """
    if window.operation_count < 2:
        return None, 0.0
    return _Neighbourhood(instance, rows, times, window).solve(effort, seed)


class _Neighbourhood:
    """The model of a window: when each of its operations starts, counted from its first start."""

    def __init__(
        self, instance: ScheduleInstance, rows: Rows, times: OrderTimes, window: Window
    ) -> None:
        self.instance, self.rows, self.window, self.ends = instance, rows, window, times.ends
        self.durations = instance.durations
        self.free = [
            row[first:stop] for row, (first, stop) in zip(rows, window.ranges, strict=True)
        ]
        members = [operation for row in self.free for operation in row]
        self.origin = min(times.ends[o] - self.durations[o] for o in members)
        # The present order is a solution, so no operation needs to end later.
        self.horizon = times.makespan_ns - self.origin
        self.model = cp_model.CpModel()
        self.starts = {
            o: self.model.new_int_var(0, self.horizon - self.durations[o], "") for o in members
        }
        self._one_at_a_time()
        self._after_inputs()
        self._within_caps()
        self._minimise()

    def _one_at_a_time(self) -> None:
        """A rank does one thing at a time, and a task takes its microbatches in order."""
        model, before = self.model, dict[int, int]()
        for row, (first, _), free in zip(self.rows, self.window.ranges, self.free, strict=True):
            intervals = [
                model.new_fixed_size_interval_var(self.starts[o], self.durations[o], "")
                for o in free
            ]
            model.add_no_overlap(intervals)
            for operation in free:
                if first:
                    self._follows(operation, row[first - 1])
                # All microbatches of a task take as long, so their order decides nothing. To fix it
                # spares CP-SAT the same solution under every numbering.
                task = operation // self.instance.problem.microbatches
                if task in before:
                    self._follows(operation, before[task])
                before[task] = operation

    def _after_inputs(self) -> None:
        for operation in self.starts:
            for source, transfer_ns in self.instance.sources[operation]:
                self._follows(operation, source, transfer_ns)
            source_in_stage = self._before_in_stage(operation)
            if source_in_stage is not None:
                self._follows(operation, source_in_stage)

    def _before_in_stage(self, operation: int) -> int | None:
        """Return what the microbatch does in the same stage before this; None for its forward."""
        kind, stage, microbatch = self.instance.decode(operation)
        kinds = self.instance.kinds[stage]
        index = kinds.index(kind)
        return self.instance.operation(kinds[index - 1], stage, microbatch) if index else None

    def _follows(self, operation: int, source: int, transfer_ns: int = 0) -> None:
        """Make an operation start after the result of `source` has arrived."""
        if source in self.starts:
            end = self.starts[source] + self.durations[source]
            self.model.add(self.starts[operation] >= end + transfer_ns)
        elif self.ends[source] + transfer_ns > self.origin:
            arrival = self.ends[source] + transfer_ns - self.origin
            self.model.add(self.starts[operation] >= arrival)

    def _within_caps(self) -> None:
        caps = self.instance.problem.caps
        if caps is None:
            return
        for rank, (row, (first, _)) in enumerate(zip(self.rows, self.window.ranges, strict=True)):
            held = sum(self.instance.byte_changes[operation] for operation in row[:first])
            self._within(caps[rank] - held, self.free[rank])

    def _within(self, room: int, free: list[int]) -> None:
        """Bound what a rank holds in the window.

        `room` is its cap less all that it holds when the window begins.
        """
        # Cap 10, and 6 are held when the window begins; 4 of them belong to a microbatch whose
        # backward lies in the window. The room is 10 − 6 + 4 = 8, and these 4 are an interval from
        # the window's begin to the end of that backward.
        intervals, demands = [], []
        for first, last, size in self._lifetimes(free):
            # It was taken before the window and is freed in it.
            if first not in self.starts:
                room += size  # it is held from the beginning on, and an interval of its own below
            start = self.starts.get(first, 0)
            end = self.starts[last] + self.durations[last] if last in self.starts else self.horizon
            length = self.model.new_int_var(0, self.horizon, "")
            intervals.append(self.model.new_interval_var(start, length, end, ""))
            demands.append(size)
        # Otherwise the cap is no constraint.
        if sum(demands) > room:
            self.model.add_cumulative(intervals, demands, room)

    def _lifetimes(self, free: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yield what takes bytes, what frees them, and how many.

        At least one of the two operations is in the window.
        """
        operation, sizes = self.instance.operation, self.instance.task_bytes
        touched = {self.instance.decode(o)[1:]: None for o in free}
        for stage, microbatch in touched:
            # A forward takes 8 bytes, its backward frees 6 and its weight backward 2. As lifetimes:
            # 6 from forward to backward, 2 from forward to weight backward.
            recomputed, between = sizes[RECOMPUTE][stage], -sizes[WEIGHT][stage]
            lifetimes = (
                (FORWARD, BACKWARD, -sizes[BACKWARD][stage] - recomputed),
                (RECOMPUTE, BACKWARD, recomputed),
                (FORWARD, WEIGHT, between),
            )
            for first_kind, last_kind, size in lifetimes:
                first = operation(first_kind, stage, microbatch)
                last = operation(last_kind, stage, microbatch)
                if size and (first in self.starts or last in self.starts):
                    yield first, last, size

    def _minimise(self) -> None:
        model, tails = self.model, self._tails
        makespan = model.new_int_var(0, self.horizon, "")
        for operation, start in self.starts.items():
            model.add(makespan >= start + self.durations[operation] + tails[operation])
            # The search starts from the present order.
            model.add_hint(start, self.ends[operation] - self.durations[operation] - self.origin)
        model.minimize(makespan)

    @cached_property
    def _tails(self) -> list[int]:
        """The longest chain that must follow each operation outside the window, in ns.

        Chains are followed backwards in time. They end at the window, since its order is not known
        yet.
        """
        tails = [0] * self.instance.code_count
        before = {right: left for row in self.rows for left, right in pairwise(row)}
        outside = [
            operation
            for row, (_, stop) in zip(self.rows, self.window.ranges, strict=True)
            for operation in row[stop:]
        ]
        for operation in sorted(outside, key=self._end_and_start, reverse=True):
            length = tails[operation] + self.durations[operation]
            previous = before.get(operation)
            if previous is not None and previous not in self.starts:
                tails[previous] = max(tails[previous], length)
            for source, transfer_ns in self.instance.sources[operation]:
                tails[source] = max(tails[source], length + transfer_ns)
        # The first operation behind the window follows all of its rank that are in it.
        for row, (_, stop), free in zip(self.rows, self.window.ranges, self.free, strict=True):
            if stop < len(row):
                length = tails[row[stop]] + self.durations[row[stop]]
                for operation in free:
                    tails[operation] = max(tails[operation], length)
        return tails

    def _end_and_start(self, operation: int) -> tuple[int, int]:
        return self.ends[operation], self.ends[operation] - self.durations[operation]

    def solve(self, effort: float, seed: int) -> tuple[Rows | None, float]:
        """Return the rows with the window in the order found, None without one, and the effort."""
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = effort
        # One worker and a fixed seed give the same order on every machine.
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        is_solved = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        spent = solver.response_proto.deterministic_time
        return (self._reordered(solver) if is_solved else None), spent

    def _reordered(self, solver: cp_model.CpSolver) -> Rows:
        def start_and_end(operation: int) -> tuple[int, int]:
            start = solver.value(self.starts[operation])
            return start, start + self.durations[operation]

        return [
            [*row[:first], *sorted(free, key=start_and_end), *row[stop:]]
            for row, (first, stop), free in zip(
                self.rows, self.window.ranges, self.free, strict=True
            )
        ]
