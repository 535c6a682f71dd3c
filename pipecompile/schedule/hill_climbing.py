"""Late acceptance hill climbing on the orders of all ranks (Burke and Bykov, 2017).

A step takes an operation on a critical path and moves it some places forward or backward in its
rank's row; only that can shorten the path. The move is kept if the order is no longer than the
present one, or than the one of some steps ago:

    row     0F2 0B0 0F3 0B1
    move            ◀── 0B1, by one place
    row     0F2 0B0 0B1 0F3
"""

from __future__ import annotations

import random
from typing import NamedTuple

from pipecompile.ir.schedule import Timeline
from pipecompile.schedule.instance import OrderTimes, Rows, ScheduleInstance

__all__ = ["hill_climb", "objective_ns"]

MEMORY = 200  # how many steps back the acceptance looks
FARTHEST = 8  # places beyond the first one that an operation moves at most


def objective_ns(times: OrderTimes | Timeline, objective: str) -> int:
    """Return what is minimised, in ns: the makespan or the largest span."""
    return times.makespan_ns if objective == "makespan" else times.span_ns


def hill_climb(
    instance: ScheduleInstance, rows: Rows, *, objective: str, steps: int, seed: int, enough: int
) -> Rows:
    """Return the best order met in so many steps.

    `rows` must fit and must not deadlock. It stops at an order whose objective is `enough`.
    """
    return _Climb(instance, rows, objective, seed).run(steps, enough)


class _Move(NamedTuple):
    """`segment` replaces as many operations of a rank's row, from index `first` on."""

    rank: int
    first: int
    segment: list[int]


class _Climb:
    """The present order, with where each operation stands, its times and a critical path."""

    def __init__(self, instance: ScheduleInstance, rows: Rows, objective: str, seed: int) -> None:
        self.instance, self.objective = instance, objective
        self.random = random.Random(seed)
        self.rows = [list(row) for row in rows]
        self.places = {
            operation: (rank, index)
            for rank, row in enumerate(rows)
            for index, operation in enumerate(row)
        }
        self.stages, self.microbatches = instance.problem.stages, instance.problem.microbatches
        times = instance.times(self.rows)
        assert times is not None, "a search starts from an order without a deadlock"
        self._accept(times)

    def _accept(self, times: OrderTimes) -> None:
        self.present = objective_ns(times, self.objective)
        self.ends = times.ends
        self.path = self._critical_path()

    def run(self, steps: int, enough: int) -> Rows:
        best, best_rows = self.present, [list(row) for row in self.rows]
        # A ring: step s is compared with the order of step s − MEMORY.
        history = [self.present] * MEMORY
        for step in range(steps):
            if best <= enough:
                break
            move = self._random_move()
            if move is not None:
                self._try(move, history[step % MEMORY])
                if self.present < best:
                    best, best_rows = self.present, [list(row) for row in self.rows]
            history[step % MEMORY] = self.present
        return best_rows

    def _try(self, move: _Move, allowed: int) -> None:
        """Make a move unless the order is then worse than the present one and than `allowed`."""
        rank, first, segment = move
        row = self.rows[rank]
        before = row[first : first + len(segment)]
        row[first : first + len(segment)] = segment
        times = self.instance.times(self.rows)
        # A move may deadlock the order; then it is undone as well.
        # An order of equal length is kept: where several paths are critical, one move shortens
        # none of them all, and it takes a drift along the plateau to come to one that helps.
        if times is None or objective_ns(times, self.objective) > max(allowed, self.present):
            row[first : first + len(segment)] = before
            return
        for index, operation in enumerate(segment, first):
            self.places[operation] = rank, index
        self._accept(times)

    def _random_move(self) -> _Move | None:
        """Return a move of an operation on the critical path; None if it may not be made."""
        operation = self.path[self.random.randrange(len(self.path))]
        rank, index = self.places[operation]
        # Short moves are by far the most likely ones.
        row, distance = self.rows[rank], 1 + min(int(self.random.expovariate(0.5)), FARTHEST)
        if self.random.random() < 0.5:
            first, passed = index - distance, row[max(index - distance, 0) : index]
            segment = [operation, *passed]
        else:
            first, passed = index, row[index + 1 : index + 1 + distance]
            segment = [*passed, operation]
        if first < 0 or len(passed) < distance or self._must_not_pass(operation, passed):
            return None
        return _Move(rank, first, segment) if self._fits(rank, first, segment) else None

    def _must_not_pass(self, operation: int, passed: list[int]) -> bool:
        """Return whether an operation must keep its place relative to one of these.

        Those are of its own stage, and have the same kind or the same microbatch.
        """
        task, microbatch = divmod(operation, self.microbatches)
        stage = task % self.stages
        for other in passed:
            other_task, other_microbatch = divmod(other, self.microbatches)
            if other_task % self.stages == stage and (
                other_task == task or other_microbatch == microbatch
            ):
                return True
        return False

    def _fits(self, rank: int, first: int, segment: list[int]) -> bool:
        """Return whether the rank stays within its cap with `segment` from index `first` on."""
        caps, changes = self.instance.problem.caps, self.instance.byte_changes
        if caps is None:
            return True
        held = sum(changes[operation] for operation in self.rows[rank][:first])
        for operation in segment:
            held += changes[operation]
            if held > caps[rank]:
                return False
        return True

    def _critical_path(self) -> list[int]:
        """Return operations that directly follow each other, from the decisive one backwards.

        Where several could come before an operation, one of them is drawn.
        """
        durations, sources, ends = self.instance.durations, self.instance.sources, self.ends
        path = [self._decisive_operation()]
        while True:
            operation = path[-1]
            start = ends[operation] - durations[operation]
            # Times are whole, so what an operation waited for ended exactly
            # when it began; no operation begins later than it must, so
            # there always is such a one, but at the start of the step.
            tight = [
                source
                for source, transfer_ns in sources[operation]
                if ends[source] + transfer_ns == start
            ]
            rank, index = self.places[operation]
            if index and ends[self.rows[rank][index - 1]] == start:
                tight.append(self.rows[rank][index - 1])
            # Nothing ends just before it: it starts the step.
            if not tight:
                return path
            path.append(tight[self.random.randrange(len(tight))] if len(tight) > 1 else tight[0])

    def _decisive_operation(self) -> int:
        """Return the last operation of the rank that ends last, or whose span is the largest."""
        return max((self._length_ns(row), row[-1]) for row in self.rows if row)[1]

    def _length_ns(self, row: list[int]) -> int:
        end = self.ends[row[-1]]
        if self.objective == "makespan":
            return end
        return end - self.ends[row[0]] + self.instance.durations[row[0]]
