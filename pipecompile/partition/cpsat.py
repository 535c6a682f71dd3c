"""The whole problem as an integer program for CP-SAT: any placement of stages on ranks, any communication model.

y[u, s] says that unit u lies in stage s or before (Tarnawski et al., NeurIPS 2020, use the same monotone form); what a
unit needs and what it feeds leave it a window of stages. Times are divided by a scale and rounded down, so every cut
costs at most what it really does: bounds hold for the exact problem, and what is found must be scored again exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from ortools.sat.python import cp_model

from pipecompile.partition.instance import Flow, Instance
from pipecompile.partition.windows import Limit, windows

__all__ = ["COARSE", "FINE", "Answer", "solve_integer"]

# All compute in units of time: CP-SAT 9.15 called a feasible model infeasible at 10⁹.
COARSE, FINE = 2_000_000, 200_000_000
LARGEST = 1 << 28  # units of time of a load: the sum of squares over all ranks must fit 64 bits


@dataclass(frozen=True)
class Answer:
    """The stages of the units of the cut that was found, if any, and a bound."""

    stages: tuple[int, ...] | None
    bound: int


def solve_integer(
    instance: Instance,
    known: Sequence[int] | None,
    limit: Limit,
    seconds: float,
    time_units: int = COARSE,
) -> Answer:
    """The best cut within `limit`, which a `known` cut meets, for variance or max-load.

    `seconds` is a deterministic budget. That there is no cut is not believed.
    """
    model = _Model.of(instance, limit, time_units)
    objective = model.build()
    model.search_early_first()
    if known is not None:
        model.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = (
        True  # several strategies in turns, the same way each time
    )
    solver.parameters.random_seed = 0
    model.model.minimize(objective)
    status = solver.solve(model.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        stages = tuple(model.stage_of(solver, unit) for unit in range(instance.count))
        return Answer(stages, model.true_bound(solver.best_objective_bound))
    if status == cp_model.UNKNOWN:
        return Answer(None, model.true_bound(solver.best_objective_bound))
    return Answer(None, 0)


@dataclass
class _Model:
    instance: Instance
    limit: Limit
    scale: int
    low: Sequence[int]
    high: Sequence[int]
    model: cp_model.CpModel
    until: dict[tuple[int, int], Any]  # y[unit, stage], a variable or 0 or 1

    @staticmethod
    def of(instance: Instance, limit: Limit, time_units: int) -> _Model:
        low, high = windows(instance, limit)
        model = _Model(instance, limit, 1, low.tolist(), high.tolist(), cp_model.CpModel(), {})
        model.scale = max(1, int(instance.compute[0].sum()) // time_units, model._most() // LARGEST)
        return model

    def build(self) -> Any:
        """All constraints; returns what is to be minimised."""
        self._place()
        problem, loads = (
            self.instance.problem,
            [self._load(stage) for stage in range(self.instance.k)],
        )
        ranks = [
            sum(loads[stage] for stage, where in enumerate(problem.stage_ranks) if where == rank)
            for rank in range(problem.ranks)
        ]
        self._restrict()
        most = self.model.new_int_var(0, self._most(), "most")
        for load in ranks:
            self.model.add(load <= most)
        if problem.objective == "max-load":
            return most
        return sum(self._square(load) for load in ranks)

    def _most(self) -> int:
        problem = self.instance.problem
        slowest = min(problem.speed(stage) for stage in range(problem.k))
        sent = sum(int(self.instance.weights(hop).sum()) for hop in self.instance.hops)
        largest = (
            int(int(self.instance.compute[0].sum()) / slowest) + 2 * problem.k * sent + problem.k
        )
        return (largest if self.limit.load is None else self.limit.load) // self.scale

    def _place(self) -> None:
        k, until = self.instance.k, self.until
        for unit in range(self.instance.count):
            for stage in range(k):
                fixed = 0 if stage < self.low[unit] else 1 if stage >= self.high[unit] else None
                until[unit, stage] = self.model.new_bool_var("") if fixed is None else fixed
            for stage in range(1, k):
                self._at_most(until[unit, stage - 1], until[unit, stage])
            for source in self.instance.before[unit]:
                for stage in range(k):
                    self._at_most(until[unit, stage], until[source, stage])

    def _at_most(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            assert left <= right, "windows contradict each other"
        elif left is not right:
            self.model.add(left <= right)

    def _in(self, unit: int, stage: int) -> Any:
        return self.until[unit, stage] - (self.until[unit, stage - 1] if stage else 0)

    def _load(self, stage: int) -> Any:
        """The load of a stage: at least what it computes and, added or as the longer of the two, what it sends."""
        problem, compute, transfers = (
            self.instance.problem,
            self._compute(stage),
            sum(self._transfers(stage)),
        )
        if problem.communication != "overlap":
            return compute + transfers
        load = self.model.new_int_var(0, self._most(), "")
        self.model.add(load >= compute)
        self.model.add(load >= transfers)
        return load

    def _compute(self, stage: int) -> Any:
        """The time of the units of a stage: at another speed than 1 the sum is rounded up, not each of them."""
        speed = self.instance.problem.speed(stage)
        times = self.instance.compute[int(stage == self.instance.k - 1)].tolist()
        work = sum(
            time * speed.denominator // self.scale * self._in(unit, stage)
            for unit, time in enumerate(times)
            if time
        )
        if speed == 1:
            return work
        compute = self.model.new_int_var(0, self._most(), "")
        # In nanoseconds a load is rounded up; in coarser units it is not, so that it is never more than it really is.
        slack = 0 if self.scale == 1 else speed.numerator - 1
        self.model.add(speed.numerator * compute + slack >= work)
        return compute

    def _transfers(self, stage: int) -> Iterator[Any]:
        if self.instance.problem.communication == "endpoint":
            yield from self._endpoints(stage)
            return
        for boundary in (stage - 1, stage):
            if 0 <= boundary < self.instance.k - 1:
                yield from self._crossing(boundary)

    def _crossing(self, boundary: int) -> Iterator[Any]:
        """What crosses a boundary: a producer before it and a consumer after it."""
        hop = self.instance.problem.hop(boundary)
        if hop is None:
            return
        for flow, weight in zip(
            self.instance.flows, self.instance.weights(hop).tolist(), strict=True
        ):
            first = self.until[flow.producer, boundary]
            ends = [self.until[unit, boundary] for unit in flow.consumers]
            if weight // self.scale and not (_is(first, 0) or all(_is(end, 1) for end in ends)):
                crosses = self.model.new_bool_var("")
                for end in ends:
                    self.model.add(crosses >= first - end)
                yield weight // self.scale * crosses

    def _endpoints(self, stage: int) -> Iterator[Any]:
        """What a stage sends or receives: it holds some ends of a tensor but not all (by rank)."""
        hop = next(iter(self.instance.hops), None)
        if hop is None:
            return
        for flow, weight in zip(
            self.instance.flows, self.instance.weights(hop).tolist(), strict=True
        ):
            if weight // self.scale and self._touches(flow, stage):
                pays = self.model.new_bool_var("")
                here = self._in_rank(flow.producer, stage)
                for unit in flow.consumers:
                    there = self._in_rank(unit, stage)
                    self.model.add(pays >= here - there)
                    self.model.add(pays >= there - here)
                yield weight // self.scale * pays

    def _touches(self, flow: Flow, stage: int) -> bool:
        """Whether an end may lie here, and charged once a rank: with its last stage."""
        ranks = self.instance.problem.stage_ranks
        stages = [s for s, rank in enumerate(ranks) if rank == ranks[stage]]
        ends = (flow.producer, *flow.consumers)
        return stage == stages[-1] and any(
            self.low[unit] <= s <= self.high[unit] for unit in ends for s in stages
        )

    def _in_rank(self, unit: int, stage: int) -> Any:
        ranks = self.instance.problem.stage_ranks
        return sum(self._in(unit, s) for s, rank in enumerate(ranks) if rank == ranks[stage])

    def _restrict(self) -> None:
        """Stages are not empty, hold parameters where they must, and fit the memory of their ranks."""
        problem, units = self.instance.problem, range(self.instance.count)
        for stage in range(problem.k):
            counted = [
                u for u in units if not problem.parameters_everywhere or self.instance.parameters[u]
            ]
            self.model.add(sum(self._in(unit, stage) for unit in counted) >= 1)
        if problem.memory is None:
            return
        held = [0] * problem.ranks
        for stage, rank in enumerate(problem.stage_ranks):
            sizes = (
                self.instance.resident + problem.memory.in_flight[stage] * self.instance.saved
            ).tolist()
            held[rank] += sum(sizes[unit] * self._in(unit, stage) for unit in units)
        for cap, size in zip(problem.memory.caps, held, strict=True):
            self.model.add(size <= cap)

    def _square(self, load: Any) -> Any:
        most = self._most()
        value, square = (
            self.model.new_int_var(0, most, ""),
            self.model.new_int_var(0, most * most, ""),
        )
        self.model.add(value >= load)
        self.model.add_multiplication_equality(square, [value, value])
        return square

    def search_early_first(self) -> None:
        """An order of decisions for the worker that follows one; without any, CP-SAT 9.15 sometimes aborts."""
        variables = [variable for variable in self.until.values() if not isinstance(variable, int)]
        self.model.add_decision_strategy(
            variables, cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE
        )

    def hint(self, known: Sequence[int]) -> None:
        """Starts from a cut."""
        for (unit, stage), variable in self.until.items():
            if not isinstance(variable, int):
                self.model.add_hint(variable, known[unit] <= stage)

    def stage_of(self, solver: cp_model.CpSolver, unit: int) -> int:
        """The stage that the solver gave a unit."""
        return next(
            stage for stage in range(self.instance.k) if solver.value(self.until[unit, stage])
        )

    def true_bound(self, found: float) -> int:
        """A bound in nanoseconds, or their squares, from one in units of time."""
        scale = (
            self.scale if self.instance.problem.objective == "max-load" else self.scale * self.scale
        )
        return max(0, floor(found + 1e-6) * scale)


def _is(variable: Any, value: int) -> bool:
    return isinstance(variable, int) and variable == value
