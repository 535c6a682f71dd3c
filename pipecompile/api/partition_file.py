"""`pipecompile partition`: the partitioner alone, on a cost graph in a file. Needs no PyTorch.

Memory is counted by the simple rule of the cost-graph format. A plan has its own composition, with
the memory model and recompute: see planner/partition.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from pipecompile.api.links import link_of, links_of
from pipecompile.errors import InfeasibleError, InputError, PipecompileError
from pipecompile.ir.cut import Cut
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.option_names import PlacementShape
from pipecompile.ir.pipedream_profile import cost_graph_in
from pipecompile.ir.plan import Options
from pipecompile.ir.size import parse_bytes
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from pipecompile.planner.partition_problem import simulated_step_ns
from pipecompile.schedule.named_orders import peak_in_flight, required_placement
from pipecompile.schedule.placement import place

__all__ = ["CutRequest", "links_from_options", "partition", "partition_over_ranks"]

T = TypeVar("T")
SUGGESTING_SECONDS = 1.0  # of work on each change that might make an infeasible problem feasible
SUGGESTIONS = 2


@dataclass(frozen=True)
class CutRequest:
    """The options of `pipecompile partition`; InputError says which of them do not go together.

    `memory` and `speeds` are one value for all ranks, or one a rank with commas between. One
    microbatch is in flight, unless a schedule and a number of microbatches are given. `ranks` lets
    stages have data-parallel replicas, that many ranks in all.
    """

    k: int
    objective: str = "variance"
    memory: str | None = None
    links: Links = FREE
    communication: str = "endpoint"
    schedule: str | None = None
    microbatches: int | None = None
    state_factor: str = "1"
    stages_per_rank: int = 1
    placement: PlacementShape = "loop"
    speeds: str | None = None
    ranks: int | None = None
    pin: Mapping[str, int] = field(default_factory=dict)
    no_split: tuple[tuple[str, ...], ...] = ()
    parameters_everywhere: bool = False
    granularity: str = "operators"

    def __post_init__(self) -> None:
        self._check_schedule()
        # For its error: the value is used only after the graph was read.
        _fraction(self.state_factor)
        if self.schedule is not None and self.stages_per_rank > 1:
            raise InputError(
                "--schedule knows one stage a rank; leave it out, or use --stages-per-rank 1"
            )
        if self.k < 1:
            raise InputError(f"k={self.k}, but a pipeline has at least one stage")
        if self.stages_per_rank < 1 or self.k % self.stages_per_rank:
            raise InputError(
                f"k={self.k} stages cannot lie {self.stages_per_rank} on each rank: choose a "
                f"divisor of k"
            )

    def _check_schedule(self) -> None:
        if (self.schedule is None) != (self.microbatches is None):
            raise InputError(
                "--schedule and --microbatches go together: how many are in flight depends on both"
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise InputError(f"--microbatches {self.microbatches}: a step has at least one")
        if self.schedule is not None:
            required_placement(self.schedule)  # refuses an unknown name
        if self.objective == "step-time" and self.schedule == "forward-only":
            raise InputError(
                "step-time weighs a step with backwards, which forward-only has not; choose "
                "max-load"
            )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return place(self.placement, self.k // self.stages_per_rank, self.stages_per_rank)

    def problem(self, graph: CostGraph) -> PartitionProblem:
        """Return the problem for a graph; InputError or InfeasibleError says what does not fit."""
        # Before units are merged, which takes long on large graphs.
        if self.k > len(graph.nodes):
            count = len(graph.nodes)
            raise InfeasibleError(
                f"k={self.k}, but the graph can be cut into at most {count} stages; choose "
                f"k ≤ {count}"
            )
        if self.objective == "step-time" and self.speeds is not None:
            raise InputError("objective step-time is simulated with equal ranks; choose max-load")
        return PartitionProblem(
            graph,
            self.k,
            objective=self.objective,
            communication=self.communication,
            links=self.links,
            placement=self.stage_ranks,
            speeds=self._speeds(),
            memory=self._memory_constraint(graph),
            pin=self.pin,
            together=self.no_split,
            granularity=self.granularity,
            parameters_everywhere=self.parameters_everywhere,
            replica_ranks=self.ranks,
            microbatches=self.microbatches or 1,
            step_ns=self._step_simulator(graph),
        )

    def _speeds(self) -> tuple[Fraction, ...] | None:
        if self.speeds is None:
            return None
        return tuple(self._per_rank("--speeds", self.speeds, _fraction))

    def _memory_constraint(self, graph: CostGraph) -> MemoryConstraint | None:
        if self.memory is None:
            return None
        # Without a schedule, a stage holds what one microbatch saves.
        in_flight_counts = (1,) * self.k
        if self.schedule is not None:
            in_flight_counts = peak_in_flight(self.schedule, range(self.k), self.microbatches or 1)
        caps = tuple(self._per_rank("--memory", self.memory, parse_bytes))
        factor = _fraction(self.state_factor)
        return MemoryConstraint.simple(graph, caps, in_flight_counts, factor)

    def _per_rank(self, option: str, text: str, parse: Callable[[str], T]) -> list[T]:
        """Return the value of an option for each rank."""
        values, ranks = [parse(part) for part in text.split(",")], self.k // self.stages_per_rank
        if len(values) not in (1, ranks):
            raise InputError(
                f"{option} {text}: give one value, or one for each of the {ranks} ranks"
            )
        # For 4 ranks "16GiB" is 16 GiB on each, and "16GiB,8GiB" an error, never a pattern.
        return values * ranks if len(values) == 1 else values

    def _step_simulator(self, graph: CostGraph) -> Callable[[Mapping[str, int]], int] | None:
        """Return what simulates the step of an assignment in ns; None without a schedule."""
        if self.schedule is None:
            return None
        options = Options(
            k=self.k,
            microbatches=self.microbatches or 1,
            schedule=self.schedule,
            objective=self.objective,
            recompute="none",
            memory_bytes=None,
            costs="table",
        )
        return lambda assignment: simulated_step_ns(graph, assignment, options, self.links)


def partition(path: str | Path, request: CutRequest, *, seconds: float = 10.0) -> Cut:
    """Return the cut of the cost graph in a file, by about `seconds` of work.

    Raise InfeasibleError if there is none; it says which constraint cannot be met and how many
    stages would fit.
    """
    _check_seconds(seconds)
    return _best_cut(cost_graph_in(path), request, seconds)


def partition_over_ranks(path: str | Path, request: CutRequest, *, seconds: float = 10.0) -> Cut:
    """Return the cut of least largest load over the `ranks` of the request, into any number of
    stages: PipeDream's planner (arXiv 1806.03377, section 3.2). The `k` of the request is not read.

    Of cuts that are as good it is the one with the fewest stages, which keeps the fewest
    microbatches in flight. Raise InfeasibleError if no number of stages has a cut.
    """
    _check_seconds(seconds)
    # Read first: a wrong file is the mistake to name, even if options are missing as well.
    graph = cost_graph_in(path)
    if request.ranks is None or request.objective != "max-load":
        raise InputError(
            "numbers of stages are compared by their largest load over all ranks: give --ranks and "
            "--objective max-load, or the number of stages with -k"
        )
    cuts, began = list[Cut](), time.perf_counter()
    # k stages over R ranks, with replicas for some: from one stage on all ranks (no pipeline at
    # all) to one rank each. The seconds are shared out evenly, so that the whole takes what was
    # asked for.
    numbers = range(1, min(request.ranks, len(graph.nodes)) + 1)
    for k in numbers:
        try:
            cuts.append(_best_cut(graph, replace(request, k=k), seconds / len(numbers)))
        except InfeasibleError:
            if k == numbers[-1] and not cuts:
                raise
    # `min` returns the first of equals, and the numbers of stages rise.
    best = min(cuts, key=lambda cut: cut.value)
    # No cut into any number of stages is better than the lowest of their bounds.
    bound = min(cut.bound for cut in cuts)
    return msgspec.structs.replace(
        best,
        bound=bound,
        gap=(best.value - bound) / best.value if best.value else 0.0,
        proven=best.value == bound,
        seconds=round(time.perf_counter() - began, 3),
    )


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds < inf:
        raise InputError(f"a time limit of {seconds:g} s: give a positive number")


def _best_cut(graph: CostGraph, request: CutRequest, seconds: float) -> Cut:
    """Return the best cut of a graph; InfeasibleError as `partition`."""
    began = time.perf_counter()
    try:
        result = solve(request.problem(graph), seconds=seconds)
    except InfeasibleError as error:
        # No larger number of stages would fit either.
        if request.k > len(graph.nodes):
            raise
        raise InfeasibleError(f"{error}{_what_would_fit(graph, request)}") from None
    return _cut_of(graph, result, round(time.perf_counter() - began, 3))


def _cut_of(graph: CostGraph, partition: Partition, seconds: float) -> Cut:
    """Return the result for people and scripts."""
    search = partition.search
    return Cut(
        stages=partition.assignment,
        loads_with_transfers_ns=partition.loads_with_transfers_ns,
        max_load_ns=search.values["max_load_ns"],
        sum_of_squares_ns2=search.values["sum_of_squares_ns2"],
        variance_ns2=search.values["variance_ns2"],
        objective=search.objective,
        value=search.value,
        bound=search.bound,
        gap=search.gap,
        proven=search.proven,
        method=search.method,
        seconds=seconds,
        replicas=partition.replicas,
        time_unit=graph.time_unit,
    )


def links_from_options(path: str | None, bandwidth: float | None, latency_ns: int) -> Links:
    """Return the links in a file, or one link for all ranks; raise InputError if both are given."""
    if path is None:
        return Links.of(link_of(bandwidth, latency_ns))
    if bandwidth is not None or latency_ns:
        raise InputError(
            "--links says all about bandwidth and latency: leave --bandwidth and --latency out"
        )
    return links_of(path)


def _what_would_fit(graph: CostGraph, request: CutRequest) -> str:
    """Return the nearest larger numbers of stages that can be met, as the end of a sentence.

    It is "" if none is found.
    """
    # Ranks that run several stages need a multiple of them.
    step = request.stages_per_rank
    # For k=2 that is 3, 4, 5 and 6, and for k=4 with two stages a rank 6, 8 and 10: a few more
    # stages are advice, ten times as many are none.
    more = [replace(request, k=k) for k in range(request.k + step, 2 * request.k + 3, step)]
    fitting = [f"k={other.k}" for other in more if _is_feasible(graph, other)]
    return f"; this would fit: {' or '.join(fitting[:SUGGESTIONS])}" if fitting else ""


def _is_feasible(graph: CostGraph, request: CutRequest) -> bool:
    try:
        solve(request.problem(graph), seconds=SUGGESTING_SECONDS, explained=False)
    except PipecompileError:
        return False
    return True


def _fraction(text: str) -> Fraction:
    try:
        # Exact: as a float 0.1 is not 1 / 10, and values that are proven are whole numbers.
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{text!r} is not a number; write 1, 0.5 or 3/2") from None
    if number < 0:
        raise InputError(f"{text!r} is negative; write 1, 0.5 or 3/2")
    return number
