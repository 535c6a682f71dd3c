"""Searches an order for one instance, within a budget.

The stages of the search and their shares of the budget, where there is time for climbing:

    seeds          the serial order and the named ones, as they are and with refilled weights
    25 %           list scheduling
                   weight backwards moved to the end of the step and into waits, in turns
    35 %           hill climbing from each of the best orders
    20 %           windows of the best order, reordered by CP-SAT
    20 %           hill climbing from the best order

Work is counted in operations looked at, not in time, so that the same problem and budget give the
same order on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.hill_climbing import hill_climb, objective_ns
from pipecompile.schedule.instance import OrderTimes, Rows, ScheduleInstance
from pipecompile.schedule.list_scheduling import (
    Priorities,
    build_order,
    refill_weight_backwards,
)
from pipecompile.schedule.priorities import (
    random_priorities,
    systematic_priorities,
    thrifty_priorities,
    varied_priorities,
)
from pipecompile.schedule.problem import Network
from pipecompile.schedule.serial_order import serial_order
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.weight_backwards import (
    advance_weight_backwards,
    postpone_weight_backwards,
)

__all__ = ["OPERATIONS_PER_SECOND", "OrderSearch"]

OPERATIONS_PER_SECOND = 1_000_000  # what the search looks at in a second of its budget
LOOKS_PER_BUILD = 4  # a step of list scheduling takes as long as so many operations
POOL_SIZE = 12
CLIMBERS = 4  # orders of the pool from which climbing starts
WINDOW_OPERATIONS = 60
WINDOW_EFFORT = 0.05  # CP-SAT's deterministic time for a window
SECONDS_PER_EFFORT = 7.0  # what a unit of that time takes, with CP-SAT's set-up
WINDOW_SECONDS = 0.004  # what the model of a window takes besides
# Windows without a gain, for each window's worth of operations, after which they are given up.
IDLE_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class _OrderCandidate:
    """An order, its objective in ns, and the priorities that it was built by, if any."""

    value_ns: int
    rows: Rows
    priorities: Priorities | None


class OrderSearch:
    """One search; `pool` holds the best orders, all of different value, the best one first.

    `bound_ns` is a lower bound: an order that meets it ends the search. `named` are schedules that
    serve as seeds.
    """

    def __init__(
        self,
        instance: ScheduleInstance,
        objective: str,
        bound_ns: int,
        seconds: float,
        named: Sequence[Schedule],
    ) -> None:
        self.instance, self.objective, self.bound_ns = instance, objective, bound_ns
        self.random = random.Random(0)
        self.named = named
        self.budget, self.size = seconds * OPERATIONS_PER_SECOND, instance.operation_count
        self.pool: list[_OrderCandidate] = []

    def run(self) -> Schedule:
        """Return the best order found, as a schedule of compute actions."""
        self._seed()
        # Without time for climbing most of the budget goes to list schedules.
        self._build(self.budget * (0.25 if self._climbs else 0.8))
        self._move_weight_backwards()
        for number, candidate in enumerate(self.pool[:CLIMBERS]):
            self._climb(candidate, self.budget * 0.35 / CLIMBERS, number)
        self._reorder_windows(self.budget * 0.2)
        self._climb(self.pool[0], self.budget * 0.2, CLIMBERS)
        return self.instance.to_schedule("search", self._best_on_network())

    @property
    def _is_optimal(self) -> bool:
        return bool(self.pool) and self.pool[0].value_ns <= self.bound_ns

    @property
    def _climbs(self) -> bool:
        """Whether there is time for so many steps of climbing that some of them help."""
        return self.budget * 0.35 / CLIMBERS > 200 * self.size

    def _add(self, rows: Rows | None, priorities: Priorities | None = None) -> None:
        """Add an order to the pool if it fits, has no deadlock, and has a value of its own."""
        times = None if rows is None or not self.instance.fits(rows) else self.instance.times(rows)
        if rows is None or times is None:
            return
        value_ns = objective_ns(times, self.objective)
        # Different values keep the pool from filling up with variations of one order.
        if all(value_ns != other.value_ns for other in self.pool):
            self.pool.append(_OrderCandidate(value_ns, rows, priorities))
            self.pool.sort(key=lambda candidate: candidate.value_ns)
            del self.pool[POOL_SIZE:]

    def _seed(self) -> None:
        self._add(serial_order(self.instance))
        for schedule in self.named:
            rows = self.instance.rows_of_schedule(schedule)
            self._add(rows)
            # Named orders are for equal stages: their weight backwards are rarely where they fit
            # best.
            if self.instance.fits(rows) and self.instance.times(rows) is not None:
                self._add(refill_weight_backwards(self.instance, rows))

    def _build(self, budget: float) -> None:
        """Build list schedules: by systematic priorities first, then by drawn and varied ones.

        Climbing gains most from starts that differ in kind. Without it the priorities that are best
        by themselves come first.
        """
        first = () if self._climbs else thrifty_priorities(self.instance)
        planned = chain(first, systematic_priorities(self.instance))
        for number in range(max(1, int(budget / (self.size * LOOKS_PER_BUILD)))):
            priorities = next(planned, None) or self._drawn_priorities(number)
            self._add(build_order(self.instance, priorities, self.bound_ns), priorities)
            if self._is_optimal:
                return

    def _drawn_priorities(self, number: int) -> Priorities:
        """Return random priorities for odd numbers, and else a variation of good ones."""
        known = [
            candidate.priorities for candidate in self.pool if candidate.priorities is not None
        ]
        if number % 2 or not known:
            return random_priorities(self.instance, self.random)
        index = min(int(self.random.expovariate(0.5)), len(known) - 1)
        return varied_priorities(known[index], self.random)

    def _move_weight_backwards(self) -> None:
        """Move weight backwards of the best orders to the end and into waits, while that helps."""
        for candidate in self.pool[: CLIMBERS if self._climbs else 1]:
            rows, value_ns = candidate.rows, candidate.value_ns
            for move in (postpone_weight_backwards, advance_weight_backwards) * 4:
                moved = move(self.instance, rows, self._times(rows))
                times = self.instance.times(moved) if self.instance.fits(moved) else None
                if times is not None and objective_ns(times, self.objective) <= value_ns:
                    rows, value_ns = moved, objective_ns(times, self.objective)
            self._add(rows, candidate.priorities)

    def _climb(self, start: _OrderCandidate, budget: float, seed: int) -> None:
        steps = int(budget / self.size)
        if self._is_optimal or not steps:
            return
        rows = hill_climb(
            self.instance,
            start.rows,
            objective=self.objective,
            steps=steps,
            seed=seed,
            enough=self.bound_ns,
        )
        self._add(rows)

    def _reorder_windows(self, budget: float) -> None:
        """Reorder windows of the best order, drawn from all of its time.

        An order of the same length is taken too, since it leads on to others.
        """
        if self._is_optimal or self.objective != "makespan" or budget < OPERATIONS_PER_SECOND / 10:
            return
        # Imported here because CP-SAT takes longer to load than small problems to solve.
        from pipecompile.schedule.window import improve_window, window_between

        rows, left_seconds, idle = self.pool[0].rows, budget / OPERATIONS_PER_SECOND, 0
        while left_seconds > 0 and idle < IDLE_WINDOWS * (1 + self.size // WINDOW_OPERATIONS):
            times = self._times(rows)
            if times.makespan_ns <= self.bound_ns:
                break
            # Wide enough for about WINDOW_OPERATIONS operations on average.
            width_ns = max(1, times.makespan_ns * WINDOW_OPERATIONS // self.size)
            start_ns = self.random.randrange(-width_ns // 2, times.makespan_ns)
            window = window_between(self.instance, rows, times.ends, start_ns, start_ns + width_ns)
            reordered, effort = improve_window(
                self.instance, rows, times, window, effort=WINDOW_EFFORT, seed=0
            )
            left_seconds -= effort * SECONDS_PER_EFFORT + WINDOW_SECONDS
            # The rest of the work on a window grows with the whole order.
            left_seconds -= self.size / OPERATIONS_PER_SECOND * 10
            idle += 1
            if reordered is not None:
                gain_ns = times.makespan_ns - self._times(reordered).makespan_ns
                rows = reordered if gain_ns >= 0 else rows
                idle = 0 if gain_ns > 0 else idle
        self._add(rows)

    def _times(self, rows: Rows) -> OrderTimes:
        times = self.instance.times(rows)
        assert times is not None, "orders of the pool have no deadlock"
        return times

    def _best_on_network(self) -> Rows:
        """Return the best order of the pool.

        Times of the pool are for free links that do not block. On other networks the simulator
        says which order is best.
        """
        problem = self.instance.problem
        if problem.network == Network():
            return self.pool[0].rows

        def value_ns(candidate: _OrderCandidate) -> int:
            schedule = self.instance.to_schedule("search", candidate.rows)
            return objective_ns(simulate(problem, schedule), self.objective)

        return min(self.pool, key=value_ns).rows
