"""The search for a schedule: every named one, list scheduling, climbing, large neighbourhoods; the best of all wins.

The named orders that fit are candidates as they are, and seeds: with their weight gradients refilled into the gaps they
are climbed from, as are the best of some hundred list schedules. So the result is never worse than a named order that
fits, and there is one wherever one exists. Work is counted in operations looked at, not in time: the same problem and
budget give the same order on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from pipecompile.errors import InfeasibleError
from pipecompile.ir.schedule import Schedule, Timeline
from pipecompile.schedule.hill_climbing import hill_climb, objective_ns
from pipecompile.schedule.instance import OrderTimes, Rows, ScheduleInstance
from pipecompile.schedule.list_scheduling import (
    Priorities,
    build_order,
    refill_weight_gradients,
)
from pipecompile.schedule.lower_bound import lower_bound
from pipecompile.schedule.named import SPLIT, fitting_names, generate
from pipecompile.schedule.priorities import (
    random_priorities,
    systematic_priorities,
    thrifty_priorities,
    varied_priorities,
)
from pipecompile.schedule.problem import Network, PlacedProblem
from pipecompile.schedule.recompute import add_recomputes, move_recomputes
from pipecompile.schedule.serial_order import serial_order, single_microbatch_peak
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.weight_gradients import (
    advance_weight_gradients,
    postpone_weight_gradients,
)

__all__ = [
    "OBJECTIVES",
    "SearchResult",
    "NamedResult",
    "best_named",
    "order_lower_bound",
    "simulate_named",
    "search",
]

OBJECTIVES = ("makespan", "span")
PER_SECOND = 1_000_000  # operations that the searches look at in a second
SOLVER_SECONDS = 7.0  # that a unit of CP-SAT's deterministic time takes, its set-up included
WINDOW, WINDOW_EFFORT = 60, 0.05  # operations, and deterministic time, of a neighbourhood
WINDOW_SECONDS = 0.004  # besides, for its model
IDLE_WINDOWS = 20  # without a gain, for each window's worth of operations, until it is given up
BUILD = 4  # a step of list scheduling is so many looks
NAMED = 12  # looks at each operation that a named order costs before it is a seed
LEAST = 50  # looks at each operation without which a search is not begun, if there was another
KEPT = 12
CLIMBERS = 4


@dataclass(frozen=True)
class NamedResult:
    """A named schedule on a problem: its value in ns, what each rank holds, and whether that is within the caps."""

    schedule: Schedule
    value_ns: int
    peak_bytes: tuple[int, ...]
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found (of compute actions), its value in ns, and a bound on that of all others.

    `named` are those that the placement allows, whether or not they fit.
    """

    schedule: Schedule
    objective: str
    value_ns: int
    bound_ns: int
    named: tuple[NamedResult, ...]


def search(
    problem: PlacedProblem, *, objective: str = "makespan", seconds: float = 5.0
) -> SearchResult:
    """The best order found in `seconds` of work; InfeasibleError names the rank that cannot hold one microbatch."""
    named = tuple(simulate_named(problem, objective))
    _refuse_what_never_fits(problem)
    bound = order_lower_bound(problem, objective)
    best = best_named(named)
    candidates = [] if best is None else [(best.value_ns, best.schedule)]
    if best is None or best.value_ns > bound:
        instances = list(_instances(problem))
        spent = (
            len(named) * instances[0].operation_count * NAMED // PER_SECOND
        )  # whole seconds: nothing, but for large ones
        left = max(seconds / 2, seconds - spent)
        instances = _affordable(instances, left)
        for instance in instances:
            found = move_recomputes(
                problem,
                _OrderSearch(instance, objective, bound, left / len(instances), named).run(),
            )
            candidates.append((_value(problem, found, objective), found))
    least, schedule = min(candidates, key=lambda candidate: candidate[0])
    return SearchResult(schedule, objective, least, bound, named)


def order_lower_bound(problem: PlacedProblem, objective: str) -> int:
    """No order of `problem` has a smaller value, in ns; caps count."""
    return lower_bound(_cheapest(problem), objective)


def simulate_named(problem: PlacedProblem, objective: str) -> Iterator[NamedResult]:
    """Every named schedule that trains on this placement, simulated."""
    for name in fitting_names(problem.placement, problem.microbatches):
        if problem.can_split or name not in SPLIT:
            schedule = add_recomputes(
                problem, generate(name, problem.placement, problem.microbatches)
            )
            timeline = simulate(problem, schedule)
            yield NamedResult(
                schedule,
                _measure(timeline, objective),
                timeline.peak_bytes,
                _within_caps(problem, timeline),
            )


def best_named(named: tuple[NamedResult, ...]) -> NamedResult | None:
    """The shortest of those that fit; of equals the one that holds least."""
    within = (order for order in named if order.fits)
    return min(within, key=lambda order: (order.value_ns, max(order.peak_bytes)), default=None)


def _value(problem: PlacedProblem, schedule: Schedule, objective: str) -> int:
    return _measure(simulate(problem, schedule), objective)


def _measure(timeline: Timeline, objective: str) -> int:
    return timeline.makespan_ns if objective == "makespan" else timeline.span_ns


def _within_caps(problem: PlacedProblem, timeline: Timeline) -> bool:
    return problem.caps is None or all(
        p <= cap for p, cap in zip(timeline.peak_bytes, problem.caps, strict=True)
    )


def _refuse_what_never_fits(problem: PlacedProblem) -> None:
    """InfeasibleError if a microbatch alone is too much: on its way back it holds all its stages on a rank."""
    instance = ScheduleInstance(problem, tuple(costs.can_split for costs in problem.costs))
    if problem.caps is None or serial_order(instance) is not None:
        return
    rank, needed = next(
        (r, single_microbatch_peak(instance, r))
        for r, cap in enumerate(problem.caps)
        if single_microbatch_peak(instance, r) > cap
    )
    raise InfeasibleError(
        f"no order fits: one microbatch alone holds {needed} bytes on rank {rank}, whose cap is {problem.caps[rank]}; "
        "allow more memory, use smaller microbatches, or recompute"
    )


def _cheapest(problem: PlacedProblem) -> ScheduleInstance:
    """Every backward at the least that it takes, whole or in halves: a bound for this holds for all orders."""
    costs = [
        replace(w, backward_input_ns=first, backward_weight_ns=min(whole, w.backward_ns) - first)
        for w in problem.costs
        for whole in [w.backward_input_ns + w.backward_weight_ns]
        for first in [min(w.backward_input_ns, w.backward_ns)]
    ]
    split = tuple(w.can_split for w in problem.costs)
    return ScheduleInstance(replace(problem, costs=tuple(costs)), split)


def _instances(problem: PlacedProblem) -> Iterator[ScheduleInstance]:
    """Backwards in halves wherever that may be; where halves take longer than the whole, also whole ones."""
    split = tuple(costs.can_split for costs in problem.costs)
    dear = tuple(w.backward_input_ns + w.backward_weight_ns > w.backward_ns for w in problem.costs)
    cheap = tuple(s and not d for s, d in zip(split, dear, strict=True))
    for choice in dict.fromkeys(
        (split, cheap, (False,) * problem.stages) if any(dear) else (split,)
    ):
        yield ScheduleInstance(problem, choice)


def _affordable(instances: list[ScheduleInstance], seconds: float) -> list[ScheduleInstance]:
    """As many as there is time to build and climb from an order for; one at the least."""
    return instances[: max(1, int(seconds * PER_SECOND / (LEAST * instances[0].operation_count)))]


@dataclass(frozen=True, slots=True)
class _OrderCandidate:
    """An order, what it is worth, and the policy that made it, if one did."""

    value_ns: int
    rows: Rows
    priorities: Priorities | None


class _OrderSearch:
    """One search with its budget; `pool` holds the best orders, all of different value."""

    def __init__(
        self,
        instance: ScheduleInstance,
        objective: str,
        bound: int,
        seconds: float,
        named: tuple[NamedResult, ...],
    ) -> None:
        self.instance, self.objective, self.bound_ns = instance, objective, bound
        self.random = random.Random(0)
        self.named = named
        self.budget, self.size = seconds * PER_SECOND, instance.operation_count
        self.pool: list[_OrderCandidate] = []

    def run(self) -> Schedule:
        self._seed()
        self._draw(self.budget * (0.25 if self._climbs else 0.8))
        self._settle()
        for number, candidate in enumerate(self.pool[:CLIMBERS]):
            self._climb(candidate, self.budget * 0.35 / CLIMBERS, number)
        self._windows(self.budget * 0.2)
        self._climb(self.pool[0], self.budget * 0.2, CLIMBERS)
        return self.instance.to_schedule("search", self._best_on_network())

    @property
    def _done(self) -> bool:
        return bool(self.pool) and self.pool[0].value_ns <= self.bound_ns

    def _add(self, rows: Rows | None, priorities: Priorities | None = None) -> None:
        """Into the pool, if it fits and comes to its end."""
        times = None if rows is None or not self.instance.fits(rows) else self.instance.times(rows)
        if rows is None or times is None:
            return
        worth = objective_ns(times, self.objective)
        if all(worth != other.value_ns for other in self.pool):
            self.pool.append(_OrderCandidate(worth, rows, priorities))
            self.pool.sort(key=lambda candidate: candidate.value_ns)
            del self.pool[KEPT:]

    def _seed(self) -> None:
        self._add(serial_order(self.instance))
        for order in self.named:
            rows = self.instance.rows_of_schedule(order.schedule)
            self._add(rows)
            if self.instance.fits(rows) and self.instance.times(rows) is not None:
                self._add(refill_weight_gradients(self.instance, rows))

    def _draw(self, budget: float) -> None:
        """List schedules: systematic ones first, then drawn and varied ones.

        Climbing gains most from starts that differ in kind; without it the best policies come first.
        """
        waiting = chain(
            () if self._climbs else thrifty_priorities(self.instance),
            systematic_priorities(self.instance),
        )
        for number in range(max(1, int(budget / (self.size * BUILD)))):
            priorities = next(waiting, None) or self._another(number)
            self._add(build_order(self.instance, priorities, self.bound_ns), priorities)
            if self._done:
                return

    @property
    def _climbs(self) -> bool:
        """Whether there is time for so many steps that some of them help."""
        return self.budget * 0.35 / CLIMBERS > 200 * self.size

    def _settle(self) -> None:
        """Weight gradients of the best orders into waits and to the end, in turns, while that helps."""
        for candidate in self.pool[: CLIMBERS if self._climbs else 1]:
            rows, worth = candidate.rows, candidate.value_ns
            for move in (postpone_weight_gradients, advance_weight_gradients) * 4:
                moved = move(self.instance, rows, self._timed(rows))
                times = self.instance.times(moved) if self.instance.fits(moved) else None
                if times is not None and objective_ns(times, self.objective) <= worth:
                    rows, worth = moved, objective_ns(times, self.objective)
            self._add(rows, candidate.priorities)

    def _another(self, number: int) -> Priorities:
        known = [
            candidate.priorities for candidate in self.pool if candidate.priorities is not None
        ]
        if number % 2 or not known:
            return random_priorities(self.instance, self.random)
        return varied_priorities(
            known[min(int(self.random.expovariate(0.5)), len(known) - 1)], self.random
        )

    def _climb(self, start: _OrderCandidate, budget: float, seed: int) -> None:
        steps = int(budget / self.size)
        if not self._done and steps:
            rows = hill_climb(
                self.instance,
                start.rows,
                objective=self.objective,
                steps=steps,
                seed=seed,
                enough=self.bound_ns,
            )
            self._add(rows)

    def _windows(self, budget: float) -> None:
        """Neighbourhoods of the best order, drawn from all of its time; equal ones are taken too, to go on from."""
        if self._done or self.objective != "makespan" or budget < PER_SECOND / 10:
            return
        # Imported here: CP-SAT takes longer to load than small problems to solve.
        from pipecompile.schedule.window import improve_window, window_between

        rows, left, idle = self.pool[0].rows, budget / PER_SECOND, 0
        while left > 0 and idle < IDLE_WINDOWS * (1 + self.size // WINDOW):
            times = self._timed(rows)
            if times.makespan_ns <= self.bound_ns:
                break
            width = max(1, times.makespan_ns * WINDOW // self.size)
            start = self.random.randrange(-width // 2, times.makespan_ns)
            window = window_between(self.instance, rows, times.ends, start, start + width)
            found, spent = improve_window(
                self.instance, rows, times, window, effort=WINDOW_EFFORT, seed=0
            )
            left -= spent * SOLVER_SECONDS + WINDOW_SECONDS + self.size / PER_SECOND * 10
            gain = -1 if found is None else times.makespan_ns - self._timed(found).makespan_ns
            rows, idle = (
                found if found is not None and gain >= 0 else rows,
                0 if gain > 0 else idle + 1,
            )
        self._add(rows)

    def _timed(self, rows: Rows) -> OrderTimes:
        times = self.instance.times(rows)
        assert times is not None, "orders of the pool come to their end"
        return times

    def _best_on_network(self) -> Rows:
        """The best of the pool; where links are shared or sends block, as the simulator says."""
        problem = self.instance.problem
        if problem.network == Network():
            return self.pool[0].rows
        schedules = [
            (candidate, self.instance.to_schedule("search", candidate.rows))
            for candidate in self.pool
        ]
        return min(schedules, key=lambda pair: _value(problem, pair[1], self.objective))[0].rows
