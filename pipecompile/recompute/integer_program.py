"""The cheapest regions as an integer program for CP-SAT: any regions, and a bound on their time.

Variables, for a stage of n positions:

    region[a, b]    the nodes a … b − 1 are one region          (for each useful pair of ends)
    plain[p]        the node at p is in no region
    kept[t][p]      tensor t is kept by what lies up to p       (from its producer to its last use)

Each position is covered exactly once: plain[p] + Σ region[a, b] over a ≤ p < b = 1. A tensor is
kept from p on if the node at p saves it and is plain, or if a region that covers p reads it. A
region's own peaks are constants of its two ends, so peaks are exactly those of `RegionSearch`. They
must fit at every position, with what the other microbatches in flight keep.

Bytes and times are divided by units and rounded down. So every choice costs at most what it really
does: bounds hold for the exact problem, and what is found is priced again.
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
from pipecompile.recompute.region import Region, RegionEnds
from pipecompile.recompute.region_search import RegionSearch

__all__ = ["refined"]

BYTE_UNITS = 1 << 24  # most units of bytes in what is available
TIME_UNITS = 1 << 21  # most units of time in that of all nodes
TRIES = 4  # with less memory in turn, where what was found fits by rounded bytes only
LARGEST = 3000  # regions to choose from (eight blocks of a GPT); with more, it takes a minute

Term = tuple[int, Any]
"""Bytes, and the variable (or 1) that they are multiplied with."""


def refined(
    problem: RecomputeProblem,
    in_flight: int,
    available: int,
    known: Sequence[Region] | None,
    seconds: float,
) -> tuple[tuple[Region, ...] | None, int]:
    """Return fitting regions of a whole stage, and a bound in ns that no fitting regions are below.

    Regions fit if `in_flight` microbatches, one at its peak, take at most `available` bytes. Those
    returned take no more time than the `known` ones, which fit. None if none are known and none
    were found in `seconds`, a deterministic budget: the same call gives the same regions. Long
    stages are not searched; their bound is 0.
    """
    best = None if known is None else priced(problem, known)
    ends = RegionEnds.of(problem)
    room, bound = available, None
    for _ in range(TRIES if len(ends.regions) <= LARGEST else 0):
        regions, proven = _RegionProgram(problem, in_flight, room, best, ends).solve(seconds)
        bound = proven if bound is None else bound  # only the first has all the room
        if regions is None:
            break
        choice = priced(problem, regions)
        excess = (in_flight - 1) * choice.kept + choice.peak - available
        if excess <= 0:
            best = choice if best is None or choice.ns < best.ns else best
            break
        # Rounded down, bytes fit that do not fit exactly: ask for that much less.
        room -= excess
    return (None if best is None else best.regions), bound or 0


@dataclass
class _RegionProgram:
    """The program for one amount of memory."""

    problem: RecomputeProblem
    in_flight: int
    available: int
    known: RegionChoice | None
    ends: RegionEnds

    def __post_init__(self) -> None:
        self.model = cp_model.CpModel()
        self.count = len(self.problem.forward_ns)
        self.search = RegionSearch(self.problem, 0, self.count)
        self.tensors = [t for t in self.problem.tensors if not t.is_sent and t.bytes]
        self.time_unit = -(-sum(self.problem.forward_ns) // TIME_UNITS) or 1
        self.region: dict[Region, Any] = {
            region: self.model.new_bool_var("") for region in self._candidates()
        }
        self.plain = [self.model.new_bool_var("") for _ in range(self.count)]
        # By tensor and position from its producer on; the last one says whether it stays kept.
        self.kept: list[list[Any]] = []

    def solve(self, seconds: float) -> tuple[tuple[Region, ...] | None, int]:
        """Return regions that fit by rounded bytes, and a bound on the time of all that do."""
        for position in range(self.count):
            covering = (variable for _, variable in self._covering[position])
            self.model.add_exactly_one(self.plain[position], *covering)
        self.kept = [list(self._kept_variables(tensor)) for tensor in self.tensors]
        for position in range(self.count):
            for terms in self._peaks(position):
                self._require_fit(terms)
        self._require_fit(self._peak_of_copies())
        times = (self._ns(each) // self.time_unit * v for each, v in self.region.items())
        self.model.minimize(sum(times))
        self._hint()
        solver = _solver(seconds)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            # "Infeasible" is not reported as a proof: the caller has a bound of its own for that.
            return None, 0
        bound = max(0, round(solver.best_objective_bound)) * self.time_unit
        if status == cp_model.UNKNOWN:
            return None, bound
        chosen = (region for region, variable in self.region.items() if solver.value(variable))
        return tuple(sorted(chosen)), bound

    def _candidates(self) -> Iterator[Region]:
        """Yield the regions that fit by themselves, and those that are known."""
        for region in self.ends.regions:
            peak = self.problem.sent_bytes + self.search.region_cost(region).backward
            if peak <= self.available:
                yield region
        for region in self.known.regions if self.known else ():
            if region.start not in self.ends.begins or region.stop not in self.ends.stops:
                yield region

    @cached_property
    def _covering(self) -> list[list[tuple[Region, Any]]]:
        """The regions that cover each position, with their variables."""
        covering: list[list[tuple[Region, Any]]] = [[] for _ in range(self.count)]
        for region, variable in self.region.items():
            for position in range(*region):
                covering[position].append((region, variable))
        return covering

    # -- what is kept

    def _kept_variables(self, tensor: StoredTensor) -> Iterator[Any]:
        """Yield by position whether what lies up to there keeps the tensor: 0, or a variable.

        Once kept, it stays so: a variable implies the next one.
        """
        before: Any = 0
        for position in range(tensor.producer, tensor.last_use + 1):
            needs = self._needs(tensor, position)
            # Nothing here needs it: whether it is kept does not change, and no variable is needed.
            if not needs:
                yield before
                continue
            now = self.model.new_bool_var("")
            self.model.add(now >= sum(needs))
            if not isinstance(before, int):
                self.model.add_implication(before, now)
            yield now
            before = now

    def _needs(self, tensor: StoredTensor, position: int) -> list[Any]:
        """Return the variables at a position that need the tensor kept.

        These are the node there if it saves the tensor, and the regions that read it from outside.
        """
        if position < 0:
            return []
        users = sorted({*tensor.uses, *tensor.savers})
        needs = []
        for region, variable in self._covering[position]:
            reads = any(region.start <= user < region.stop for user in users)
            if region.start > tensor.producer and reads:
                needs.append(variable)
        return needs + ([self.plain[position]] if position in tensor.savers else [])

    def _kept_by(self, position: int) -> list[Term]:
        """Return what is kept by all that lies up to a position."""
        terms = []
        for tensor, variables in zip(self.tensors, self.kept, strict=True):
            if tensor.producer <= position:
                index = min(position, tensor.last_use) - tensor.producer
                terms.append((tensor.bytes, variables[index]))
        return terms + self._copied_by(position)

    def _copied_by(self, position: int) -> list[Term]:
        """Return the buffer copies of regions that begin up to a position."""
        return [
            (size, self.region[region])
            for region, size in self._buffer_copies
            if region.start <= position
        ]

    @cached_property
    def _buffer_copies(self) -> list[tuple[Region, int]]:
        sizes = [(region, self.search.region_cost(region).buffer_copies) for region in self.region]
        return [(region, size) for region, size in sizes if size]

    # -- what lives

    def _peaks(self, position: int) -> Iterator[list[Term]]:
        """Yield what lives in a node's forward, in its backward, and after its backward."""
        problem, plain = self.problem, self.plain[position]
        # Forward: tensors on their way to a later reader, and those kept after their last use.
        gone = [
            (tensor.bytes, variables[-1])
            for tensor, variables in zip(self.tensors, self.kept, strict=True)
            if tensor.last_use < position
        ]
        waiting = sum(t.bytes for t in self.tensors if t.producer < position <= t.last_use)
        sent = sum(t.bytes for t in problem.tensors if t.is_sent and t.producer < position)
        running = (waiting + sent + problem.forward_peak[position], 1)
        yield [running, *gone, *self._copied_by(position)]
        # Backward: what is kept up to here, and the peak of the node or of its region.
        regions = self._covering[position]
        own = [(self.search.region_cost(region).backward, variable) for region, variable in regions]
        here = (problem.backward_peak[position], plain)
        yield [(problem.sent_bytes, 1), here, *self._kept_by(position), *own]
        # Afterwards gradients are summed, when a plain node or a whole region is done.
        after = problem.gradients_after[position]
        begun = [(after, variable) for region, variable in regions if region.start == position]
        yield [(problem.sent_bytes, 1), (after, plain), *begun, *self._kept_by(position - 1)]

    def _peak_of_copies(self) -> list[Term]:
        """Return what lives when the last node is done and copies are made for later stages."""
        rows = list(zip(self.tensors, self.kept, strict=True))
        copied = sum(tensor.bytes for tensor in self.tensors if tensor.copied_at is not None)
        kept = [(tensor.bytes, row[-1]) for tensor, row in rows if tensor.copied_at is None]
        return [(self.problem.sent_bytes + copied, 1), *kept, *self._copied_by(self.count)]

    def _require_fit(self, terms: Sequence[Term]) -> None:
        """Require that these bytes fit beside what the other microbatches in flight keep."""
        others = self.in_flight - 1
        kept = [
            (others * tensor.bytes, row[-1])
            for tensor, row in zip(self.tensors, self.kept, strict=True)
        ]
        kept += [(others * size, self.region[region]) for region, size in self._buffer_copies]
        every = [*terms, *kept, (others * self.problem.sent_bytes, 1)]
        # Rounded down on the left: a choice that fits exactly is never cut off.
        units = sum(size // self._unit * variable for size, variable in every)
        self.model.add(units <= self.available // self._unit)

    @cached_property
    def _unit(self) -> int:
        """The bytes of a unit: one that rounds nothing if the sizes allow it."""
        problem = self.problem
        sizes = (
            *problem.forward_peak,
            *problem.gradients_before,
            *problem.backward_peak,
            *problem.gradients_after,
            *problem.buffer_copies,
            *(tensor.bytes for tensor in problem.tensors),
            problem.sent_copies,
        )
        divisor = gcd(*sizes) or 1
        return divisor * (-(-self.available // (divisor * BYTE_UNITS)) or 1)

    def _ns(self, region: Region) -> int:
        return self.search.region_cost(region).ns

    def _hint(self) -> None:
        """Let the solver start from the known regions."""
        if self.known is not None:
            known = set(self.known.regions)
            for region, variable in self.region.items():
                self.model.add_hint(variable, region in known)


def _solver(seconds: float) -> cp_model.CpSolver:
    """Return a solver with one worker, which searches the same way each time."""
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # Without all rows in its linear relaxation the bound hardly moves.
    solver.parameters.linearization_level = 2
    # These would take most of the time before the search begins, and help it little.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.merge_at_most_one_work_limit = 0
    solver.parameters.symmetry_level = 0
    return solver
