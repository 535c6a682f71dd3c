"""The whole problem as an integer program for CP-SAT: any placement of stages, any communication.

Variable y[u, s] says that unit u lies in stage s or an earlier one (Tarnawski et al., NeurIPS 2020,
use the same monotone form). Windows fix most of them:

    stage s     0    1    2    3          y rises with s, and falls along an edge u → v:
    y[u, s]     0    y    1    1          y[v, s] ≤ y[u, s]
    u in s      0    y   1−y   0          the differences; here the window of u is 1 … 2

Times are divided by a scale and rounded down, so every cut costs at most what it really does:
bounds hold for the exact problem, and a cut that is found must be scored again exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from ortools.sat.python import cp_model

from pipecompile.partition.unit_graph import Flow, UnitGraph
from pipecompile.partition.windows import Limit, windows

__all__ = ["COARSE", "FINE", "IntegerSolution", "solve_integer_program"]

# All compute in units of time: CP-SAT 9.15 called a feasible model infeasible at 10⁹.
COARSE, FINE = 2_000_000, 200_000_000
LARGEST_LOAD = 1 << 28  # units of time: the sum of squares over all ranks must fit in 64 bits
ROUNDING = 1e-6  # above the error of the bounds that CP-SAT returns
WORKERS = 8  # strategies, which are interleaved


@dataclass(frozen=True)
class IntegerSolution:
    """The stages of the units in the cut that was found, None without one, and a lower bound."""

    stages: tuple[int, ...] | None
    bound: int


def solve_integer_program(
    unit_graph: UnitGraph,
    known: Sequence[int] | None,
    limit: Limit,
    seconds: float,
    time_units: int = COARSE,
) -> IntegerSolution:
    """Return the best cut within `limit` that is found, by any sum or maximum, and a bound.

    `known` are the stages of a cut within the limit. `seconds` is a deterministic budget. If CP-SAT
    says that there is no cut, it is not believed: the bound is then 0.
    """
    program = _IntegerProgram.of(unit_graph, limit, time_units)
    objective = program.build()
    program.search_early_first()
    if known is not None:
        program.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = WORKERS
    # Strategies take turns, in the same way each time, and do not race.
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 0
    program.model.minimize(objective)
    status = solver.solve(program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return IntegerSolution(None, 0)
    bound = program.bound_in_ns(solver.best_objective_bound)
    if status == cp_model.UNKNOWN:
        return IntegerSolution(None, bound)
    stages = tuple(program.stage_of(solver, unit) for unit in range(unit_graph.count))
    return IntegerSolution(stages, bound)


@dataclass
class _IntegerProgram:
    """The program while it is built. `low` and `high` are the window of each unit.

    `until[unit, stage]` is y: a variable, or 0 or 1 where the window decides.
    """

    unit_graph: UnitGraph
    limit: Limit
    scale: int  # ns per unit of time
    low: Sequence[int]
    high: Sequence[int]
    model: cp_model.CpModel
    until: dict[tuple[int, int], Any]

    @staticmethod
    def of(unit_graph: UnitGraph, limit: Limit, time_units: int) -> _IntegerProgram:
        low, high = windows(unit_graph, limit)
        program = _IntegerProgram(
            unit_graph, limit, 1, low.tolist(), high.tolist(), cp_model.CpModel(), {}
        )
        compute = int(unit_graph.compute[0].sum())
        # At scale 1, `_largest_load` is in ns.
        program.scale = max(1, compute // time_units, program._largest_load() // LARGEST_LOAD)
        return program

    def build(self) -> Any:
        """Add all constraints, and return the expression that is minimised."""
        problem = self.unit_graph.problem
        self._add_units()
        loads = [self._load(stage) for stage in range(self.unit_graph.k)]
        self._add_stage_constraints()
        rank_loads = [0] * problem.ranks
        for rank, load in zip(problem.stage_ranks, loads, strict=True):
            rank_loads[rank] += load
        most = self.model.new_int_var(0, self._largest_load(), "most")
        for load in rank_loads:
            self.model.add(load <= most)
        if problem.objective == "max-load":
            return most
        if problem.objective == "total-load":
            return sum(rank_loads)
        return sum(self._square(load) for load in rank_loads)

    def _largest_load(self) -> int:
        """Return an upper bound of the load of a rank, in units of time."""
        problem = self.unit_graph.problem
        if self.limit.load is not None:
            return self.limit.load // self.scale
        slowest = min(problem.speed(stage) for stage in range(problem.k))
        sent = sum(int(self.unit_graph.weights(hop).sum()) for hop in self.unit_graph.hops)
        compute = int(int(self.unit_graph.compute[0].sum()) / slowest)
        return (compute + 2 * problem.k * sent + problem.k) // self.scale

    # Where units lie

    def _add_units(self) -> None:
        """Add the variables of all units, and the order that edges demand."""
        stages, until = range(self.unit_graph.k), self.until
        for unit in range(self.unit_graph.count):
            for stage in stages:
                if stage < self.low[unit]:
                    until[unit, stage] = 0
                elif stage >= self.high[unit]:
                    until[unit, stage] = 1
                else:
                    until[unit, stage] = self.model.new_bool_var("")
            for stage in stages[1:]:
                self._add_at_most(until[unit, stage - 1], until[unit, stage])
            for source in self.unit_graph.before[unit]:
                for stage in stages:
                    self._add_at_most(until[unit, stage], until[source, stage])

    def _add_at_most(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            assert left <= right, "windows contradict each other"
        elif left is not right:
            self.model.add(left <= right)

    def _is_in(self, unit: int, stage: int) -> Any:
        return self.until[unit, stage] - (self.until[unit, stage - 1] if stage else 0)

    def _is_in_rank_of(self, unit: int, stage: int) -> Any:
        ranks = self.unit_graph.problem.stage_ranks
        return sum(self._is_in(unit, s) for s, rank in enumerate(ranks) if rank == ranks[stage])

    def _add_stage_constraints(self) -> None:
        """Add the constraints of single stages.

        Stages are not empty, have parameters if they must, and fit the memory of their ranks.
        """
        problem, units = self.unit_graph.problem, range(self.unit_graph.count)
        required = [
            u for u in units if not problem.parameters_everywhere or self.unit_graph.parameters[u]
        ]
        for stage in range(problem.k):
            self.model.add(sum(self._is_in(unit, stage) for unit in required) >= 1)
        if problem.memory is None:
            return
        held = [0] * problem.ranks
        for stage, rank in enumerate(problem.stage_ranks):
            saved = problem.memory.in_flight[stage] * self.unit_graph.saved
            sizes = (self.unit_graph.resident + saved).tolist()
            held[rank] += sum(sizes[unit] * self._is_in(unit, stage) for unit in units)
        for cap, size in zip(problem.memory.caps, held, strict=True):
            self.model.add(size <= cap)

    # Loads

    def _load(self, stage: int) -> Any:
        """Return the load of a stage.

        It is compute plus transfers, or the longer of them if they overlap.
        """
        compute, transfers = self._compute(stage), sum(self._transfers(stage))
        if self.unit_graph.problem.communication != "overlap":
            return compute + transfers
        load = self.model.new_int_var(0, self._largest_load(), "")
        # ≥ is enough here and below: loads are minimised, so that nothing holds a variable
        # up but what it stands for. An equation of a maximum would need further variables.
        self.model.add(load >= compute)
        self.model.add(load >= transfers)
        return load

    def _compute(self, stage: int) -> Any:
        """Return the compute of a stage.

        At another speed than 1, the sum is rounded up, and not each unit.
        """
        speed = self.unit_graph.problem.speed(stage)
        times = self.unit_graph.compute[int(stage == self.unit_graph.k - 1)].tolist()
        work = sum(
            time * speed.denominator // self.scale * self._is_in(unit, stage)
            for unit, time in enumerate(times)
            if time
        )
        if speed == 1:
            return work
        compute = self.model.new_int_var(0, self._largest_load(), "")
        # In ns a load is rounded up. In coarser units it is not, so that it is never more than it
        # is.
        slack = 0 if self.scale == 1 else speed.numerator - 1
        self.model.add(speed.numerator * compute + slack >= work)
        return compute

    def _transfers(self, stage: int) -> Iterator[Any]:
        if self.unit_graph.problem.communication == "endpoint":
            yield from self._endpoint_transfers(stage)
            return
        for boundary in (stage - 1, stage):
            if 0 <= boundary < self.unit_graph.k - 1:
                yield from self._crossing_transfers(boundary)

    def _crossing_transfers(self, boundary: int) -> Iterator[Any]:
        """Yield the weight of each flow that may cross a boundary, times whether it does.

        A flow crosses with its producer before the boundary and a consumer after it.
        """
        hop = self.unit_graph.problem.hop(boundary)
        if hop is None:
            return
        weights = (self.unit_graph.weights(hop) // self.scale).tolist()
        for flow, weight in zip(self.unit_graph.flows, weights, strict=True):
            producer = self.until[flow.producer, boundary]
            consumers = [self.until[unit, boundary] for unit in flow.consumers]
            stays = _is_fixed(producer, 0) or all(_is_fixed(end, 1) for end in consumers)
            if weight and not stays:
                crosses = self.model.new_bool_var("")
                # 1 only with the producer before the boundary, y =
                # 1, and this consumer behind it, y = 0.
                for consumer in consumers:
                    self.model.add(crosses >= producer - consumer)
                yield weight * crosses

    def _endpoint_transfers(self, stage: int) -> Iterator[Any]:
        """Yield what a rank pays for each flow of which it has some ends but not all.

        This is charged with the last stage of the rank.
        """
        hop = next(iter(self.unit_graph.hops), None)
        if hop is None:
            return
        weights = (self.unit_graph.weights(hop) // self.scale).tolist()
        for flow, weight in zip(self.unit_graph.flows, weights, strict=True):
            if weight and self._may_touch(flow, stage):
                pays = self.model.new_bool_var("")
                producer = self._is_in_rank_of(flow.producer, stage)
                for unit in flow.consumers:
                    consumer = self._is_in_rank_of(unit, stage)
                    self.model.add(pays >= producer - consumer)
                    self.model.add(pays >= consumer - producer)
                yield weight * pays

    def _may_touch(self, flow: Flow, stage: int) -> bool:
        """Return whether an end of the flow may lie on the rank of `stage`, its last stage.

        This is false for any stage that is not the last one of its rank.
        """
        ranks = self.unit_graph.problem.stage_ranks
        stages = [s for s, rank in enumerate(ranks) if rank == ranks[stage]]
        ends = (flow.producer, *flow.consumers)
        return stage == stages[-1] and any(
            self.low[unit] <= s <= self.high[unit] for unit in ends for s in stages
        )

    def _square(self, load: Any) -> Any:
        most = self._largest_load()
        # A product is of variables, and a load is a sum of many.
        value = self.model.new_int_var(0, most, "")
        square = self.model.new_int_var(0, most * most, "")
        self.model.add(value >= load)
        self.model.add_multiplication_equality(square, [value, value])
        return square

    # Search and result

    def search_early_first(self) -> None:
        """Give an order of decisions to the worker that follows one.

        Without any, CP-SAT 9.15 sometimes aborts.
        """
        variables = [variable for variable in self.until.values() if not isinstance(variable, int)]
        self.model.add_decision_strategy(
            variables, cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE
        )

    def hint(self, known: Sequence[int]) -> None:
        """Start the search from the cut with these stages."""
        for (unit, stage), variable in self.until.items():
            if not isinstance(variable, int):
                self.model.add_hint(variable, known[unit] <= stage)

    def stage_of(self, solver: cp_model.CpSolver, unit: int) -> int:
        """Return the stage that the solver gave to a unit."""
        stages = range(self.unit_graph.k)
        return next(stage for stage in stages if solver.value(self.until[unit, stage]))

    def bound_in_ns(self, bound: float) -> int:
        """Return the bound in ns, or in ns² for variance, from one in units of time."""
        is_square = self.unit_graph.problem.objective == "variance"
        scale = self.scale * self.scale if is_square else self.scale
        return max(0, floor(bound + ROUNDING) * scale)


def _is_fixed(variable: Any, value: int) -> bool:
    return isinstance(variable, int) and variable == value
