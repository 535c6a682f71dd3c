"""Late acceptance hill climbing (Burke and Bykov, 2017) on the orders of all ranks.

A step takes an operation on a critical path and moves it some places to the front or to the back of its rank's row;
only that can shorten the path. It is kept if the step is no longer than now, or than it was some steps ago.
"""

from __future__ import annotations

import random

from pipecompile.schedule.instance import OrderTimes, Rows, ScheduleInstance

__all__ = ["hill_climb", "objective_ns"]

MEMORY = 200  # steps that the acceptance looks back
FARTHEST = 8


def objective_ns(times: OrderTimes, objective: str) -> int:
    """What is minimised, in ns: the makespan or the largest span."""
    return times.makespan_ns if objective == "makespan" else times.span_ns


def hill_climb(
    instance: ScheduleInstance, rows: Rows, *, objective: str, steps: int, seed: int, enough: int
) -> Rows:
    """The best order met in so many steps from `rows`, which must fit and come to its end; it stops at `enough`."""
    return _Climb(instance, rows, objective, seed).run(steps, enough)


class _Climb:
    def __init__(self, instance: ScheduleInstance, rows: Rows, objective: str, seed: int) -> None:
        self.instance, self.objective = instance, objective
        self.random = random.Random(seed)
        self.rows = [list(row) for row in rows]
        self.places = {
            o: (rank, index) for rank, row in enumerate(rows) for index, o in enumerate(row)
        }
        self.stages, self.microbatches = instance.problem.stages, instance.problem.microbatches
        times = instance.times(self.rows)
        assert times is not None, "a search starts from an order that comes to its end"
        self._accept(times)

    def _accept(self, times: OrderTimes) -> None:
        self.now = objective_ns(times, self.objective)
        self.ends = times.ends
        self.path = self._critical_path()

    def run(self, steps: int, enough: int) -> Rows:
        best, found = self.now, [list(row) for row in self.rows]
        history = [self.now] * MEMORY
        for step in range(steps):
            if best <= enough:
                break
            move = self._move()
            if move is not None:
                self._try(*move, history[step % MEMORY])
                if self.now < best:
                    best, found = self.now, [list(row) for row in self.rows]
            history[step % MEMORY] = self.now
        return found

    def _try(self, rank: int, first: int, segment: list[int], allowed: int) -> None:
        """Puts `segment` in the place of what it reorders if that is not worse than now, or than `allowed`."""
        row = self.rows[rank]
        before = row[first : first + len(segment)]
        row[first : first + len(segment)] = segment
        times = self.instance.times(self.rows)
        if times is None or objective_ns(times, self.objective) > max(allowed, self.now):
            row[first : first + len(segment)] = before
            return
        for index, operation in enumerate(segment, first):
            self.places[operation] = rank, index
        self._accept(times)

    def _move(self) -> tuple[int, int, list[int]] | None:
        """A rank, a place in its row and what may stand from there on; None if the order forbids the move drawn."""
        operation = self.path[self.random.randrange(len(self.path))]
        rank, index = self.places[operation]
        row, distance = self.rows[rank], 1 + min(int(self.random.expovariate(0.5)), FARTHEST)
        if self.random.random() < 0.5:
            first, passed = index - distance, row[max(index - distance, 0) : index]
            segment = [operation, *passed]
        else:
            first, passed = index, row[index + 1 : index + 1 + distance]
            segment = [*passed, operation]
        if first < 0 or len(passed) < distance or self._bound(operation, passed):
            return None
        return (rank, first, segment) if self._fits(rank, first, segment) else None

    def _bound(self, operation: int, passed: list[int]) -> bool:
        """Whether it may not pass one of these: of its own stage the same kind, or the same microbatch."""
        lane, microbatch = divmod(operation, self.microbatches)
        stage = lane % self.stages
        for other in passed:
            other_lane, other_microbatch = divmod(other, self.microbatches)
            if other_lane % self.stages == stage and (
                other_lane == lane or other_microbatch == microbatch
            ):
                return True
        return False

    def _fits(self, rank: int, first: int, segment: list[int]) -> bool:
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
        """Operations without a gap between them, from one that decides the value back to the first."""
        durations, sources, ends = self.instance.durations, self.instance.sources, self.ends
        path = [self._decisive()]
        while True:
            operation = path[-1]
            start = ends[operation] - durations[operation]
            tight = [source for source, hop in sources[operation] if ends[source] + hop == start]
            rank, index = self.places[operation]
            if index and ends[self.rows[rank][index - 1]] == start:
                tight.append(self.rows[rank][index - 1])
            if not tight:
                return path
            path.append(tight[self.random.randrange(len(tight))] if len(tight) > 1 else tight[0])

    def _decisive(self) -> int:
        """The last operation of the rank that ends last, or takes longest."""
        lasts = [(self._length(row), row[-1]) for row in self.rows if row]
        return max(lasts)[1]

    def _length(self, row: list[int]) -> int:
        end = self.ends[row[-1]]
        if self.objective == "makespan":
            return end
        return end - self.ends[row[0]] + self.instance.durations[row[0]]
