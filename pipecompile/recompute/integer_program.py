"""The cheapest regions as an integer program for CP-SAT: any regions, across blocks too, and a bound on their time.

Each position lies in exactly one of: a region (a variable for each pair of ends), or none. What is kept is a variable
for each storage and position: whether it is kept by what lies up to there. That gives the peaks of `Regions` exactly:
a region's own forwards and backwards are constants of its two ends. Bytes and times are divided by units and rounded
down, so that every choice costs at most what it really does: bounds hold for the exact problem, and what is found is
priced again. Regions that another pair of ends is never worse than are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from ortools.sat.python import cp_model

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.choice import RegionChoice, priced
from pipecompile.recompute.region import RegionEnds
from pipecompile.recompute.region_search import Region, RegionSearch

__all__ = ["refined"]

BYTE_UNITS, TIME_UNITS = (
    1 << 24,
    1 << 21,
)  # most units in what is available, and in the time of all nodes
TRIES = 4  # with less memory in turn, where what was found fits by rounded bytes alone
LARGEST = 3000  # regions to choose from (eight blocks of a GPT): with more, it takes a minute


def refined(
    problem: RecomputeProblem,
    in_flight: int,
    available: int,
    known: Sequence[Region] | None,
    seconds: float,
) -> tuple[tuple[Region, ...] | None, int]:
    """Regions whose `in_flight` microbatches, one at its peak, fit, and a bound in ns: none that fit take less time.

    `tape` is a whole stage. `available` is in bytes.
    They take no more time than those `known`, which fit. None if none are known and none were found in `seconds`, a
    deterministic budget: the same regions each time. Long stages are not searched: of these the bound is 0.
    """
    best = None if known is None else priced(problem, known)
    ends = RegionEnds.of(problem)
    room, bound = available, None
    for _ in range(TRIES if len(ends.regions) <= LARGEST else 0):
        found, proven = _Model(problem, in_flight, room, best, ends).solve(seconds)
        bound = proven if bound is None else bound
        if found is None:
            break
        choice = priced(problem, found)
        over = (in_flight - 1) * choice.kept + choice.peak - available
        if over <= 0:
            best = choice if best is None or choice.ns < best.ns else best
            break
        room -= over
    return (None if best is None else best.regions), bound or 0


@dataclass
class _Model:
    """The program for one capacity."""

    problem: RecomputeProblem
    in_flight: int
    available: int
    known: RegionChoice | None
    ends: RegionEnds

    def __post_init__(self) -> None:
        self.model = cp_model.CpModel()
        self.count = len(self.problem.ns)
        self.search = RegionSearch(self.problem, 0, self.count)
        self.held = [held for held in self.problem.held if not held.sent and held.bytes]
        self.time_unit = -(-sum(self.problem.ns) // TIME_UNITS) or 1
        self.again: dict[Region, Any] = {r: self.model.new_bool_var("") for r in self._worth_it()}
        self.once = [self.model.new_bool_var("") for _ in range(self.count)]
        self.kept: list[
            list[Any]
        ] = []  # by storage and position from where it is made; the last one is for good

    def solve(self, seconds: float) -> tuple[tuple[Region, ...] | None, int]:
        """Regions that fit by rounded bytes, and a bound on the time of all that do."""
        for position in range(self.count):
            self.model.add_exactly_one(
                self.once[position], *(self.again[r] for r in self._over(position))
            )
        self.kept = [list(self._keep(held)) for held in self.held]
        for position in range(self.count):
            for terms in self._levels(position):
                self._fits(terms)
        self._fits(self._copying())
        self.model.minimize(
            sum(self._time(region) // self.time_unit * v for region, v in self.again.items())
        )
        self._hint()
        solver = _solver(seconds)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            return None, 0  # that nothing fits is not believed
        bound = max(0, round(solver.best_objective_bound)) * self.time_unit
        if status == cp_model.UNKNOWN:
            return None, bound
        return tuple(sorted(region for region, v in self.again.items() if solver.value(v))), bound

    def _worth_it(self) -> Iterator[Region]:
        """The regions that fit by themselves, and those that are known."""
        for region in self.ends.regions:
            if self.problem.sent + self.search.again(region).backward <= self.available:
                yield region
        for region in self.known.regions if self.known else ():
            if region.start not in self.ends.begins or region.stop not in self.ends.stops:
                yield region

    def _over(self, position: int) -> list[Region]:
        return [region for region in self.again if region.start <= position < region.stop]

    # -- what is kept

    def _keep(self, held: StoredTensor) -> Iterator[Any]:
        """By position from where it is made to its last use, whether what lies up to there keeps a storage."""
        before: Any = 0
        for position in range(held.made, held.last + 1):
            needs = self._needs(held, position)
            if not needs:
                yield before
                continue
            now = self.model.new_bool_var("")
            self.model.add(now >= sum(needs))
            if not isinstance(before, int):
                self.model.add_implication(before, now)
            yield now
            before = now

    def _needs(self, held: StoredTensor, position: int) -> list[Any]:
        """Of what may lie at a position that which needs a storage kept: a node that saves it, regions that read it."""
        if position < 0:
            return []
        places = sorted({*held.uses, *held.saved})
        reading = [
            variable
            for region, variable in self._by_position[position]
            if region.start > held.made
            and any(region.start <= place < region.stop for place in places)
        ]
        return reading + ([self.once[position]] if position in held.saved else [])

    @cached_property
    def _by_position(self) -> list[list[tuple[Region, Any]]]:
        return [
            [(region, self.again[region]) for region in self._over(p)] for p in range(self.count)
        ]

    def _kept_by(self, position: int) -> list[tuple[int, Any]]:
        """What is kept by all that lies up to a position, as terms: bytes and variables."""
        rows = [
            (held, row)
            for held, row in zip(self.held, self.kept, strict=True)
            if held.made <= position
        ]
        kept = [(held.bytes, row[min(position, held.last) - held.made]) for held, row in rows]
        return kept + self._copied_by(position)

    def _copied_by(self, position: int) -> list[tuple[int, Any]]:
        """What regions that begin up to a position keep of what their nodes write to, as terms."""
        return [
            (size, self.again[region]) for region, size in self._copies if region.start <= position
        ]

    @cached_property
    def _copies(self) -> list[tuple[Region, int]]:
        sizes = [(region, self.search.again(region).written) for region in self.again]
        return [(region, size) for region, size in sizes if size]

    # -- what lives

    def _levels(self, position: int) -> Iterator[list[tuple[int, Any]]]:
        """What lives in the forward of a node, in its backward, and when that is done, as terms."""
        problem, once = self.problem, self.once[position]
        gone = [
            (held.bytes, row[-1])
            for held, row in zip(self.held, self.kept, strict=True)
            if held.last < position
        ]
        waiting = sum(held.bytes for held in self.held if held.made < position <= held.last)
        sent = sum(held.bytes for held in problem.held if held.sent and held.made < position)
        yield [(waiting + sent + problem.forward[position], 1), *gone, *self._copied_by(position)]
        regions = self._by_position[position]
        backward = [(self.search.again(region).backward, variable) for region, variable in regions]
        yield [
            (problem.sent, 1),
            (problem.before[position], once),
            *self._kept_by(position),
            *backward,
        ]
        begun = [
            (problem.after[position], variable)
            for region, variable in regions
            if region.start == position
        ]
        yield [
            (problem.sent, 1),
            (problem.after[position], once),
            *begun,
            *self._kept_by(position - 1),
        ]

    def _copying(self) -> list[tuple[int, Any]]:
        """What lives when the last node is done and copies are made, as terms."""
        rows = list(zip(self.held, self.kept, strict=True))
        copied = sum(held.bytes for held in self.held if held.copied is not None)
        kept = [(held.bytes, row[-1]) for held, row in rows if held.copied is None]
        return [(self.problem.sent + copied, 1), *kept, *self._copied_by(self.count)]

    def _fits(self, terms: Sequence[tuple[int, Any]]) -> None:
        """These bytes, with all that the other microbatches keep."""
        others = [
            ((self.in_flight - 1) * held.bytes, row[-1])
            for held, row in zip(self.held, self.kept, strict=True)
        ]
        others += [
            ((self.in_flight - 1) * size, self.again[region]) for region, size in self._copies
        ]
        every = [*terms, *others, ((self.in_flight - 1) * self.problem.sent, 1)]
        self.model.add(
            sum(size // self._unit * variable for size, variable in every)
            <= self.available // self._unit
        )

    @cached_property
    def _unit(self) -> int:
        """The bytes of a unit: such that nothing is rounded if that is possible."""
        problem = self.problem
        held = [held.bytes for held in problem.held]
        sizes = (
            gcd(
                *problem.forward,
                *problem.flowing,
                *problem.before,
                *problem.after,
                *problem.written,
                *held,
                problem.copies,
            )
            or 1
        )
        return sizes * (-(-self.available // (sizes * BYTE_UNITS)) or 1)

    def _time(self, region: Region) -> int:
        return self.search.again(region).ns

    def _hint(self) -> None:
        """Starts from what is known."""
        regions = set(self.known.regions) if self.known else set()
        for region, variable in self.again.items() if self.known else ():
            self.model.add_hint(variable, region in regions)


def _solver(seconds: float) -> cp_model.CpSolver:
    """One worker, and the same search each time."""
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2  # without all rows in its LP the bound hardly moves
    # What would take most of the time before the search begins, and helps it little:
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.merge_at_most_one_work_limit = 0
    solver.parameters.symmetry_level = 0
    return solver
