"""What a search for a cut knows: the best cut so far, a lower bound, and the work done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipecompile.errors import InfeasibleError
from pipecompile.partition.budget import (
    NODES_PRICED_PER_SECOND,
    PAIRS_PER_SECOND,
    PRICE_OVERHEAD_NODES,
)
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.infeasibility import why_infeasible
from pipecompile.partition.objective import measures, rank_loads, stage_loads
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.violations import violations
from pipecompile.partition.windows import Limit

__all__ = ["SearchState", "stages_of"]

CLOSE_PARTS = 100_000  # costs are not exact to this part of a value, so no search continues for it


@dataclass(frozen=True)
class ScoredCut:
    """The stage of each unit, and the cut's value by the objective and then by another one."""

    stages: tuple[int, ...]
    value: tuple[int, int]
    replicas: tuple[int, ...] | None
    extra_ns: Mapping[int, int]
    method: str


@dataclass
class SearchState:
    """The state of a search: the best cut so far, a lower bound, and the work done.

    `is_proven`: no cut is better, or there is no cut. `crossing` bounds what every cut as good as
    the best sends over each boundary; `crossing_value` is the value for which it was computed.
    Within `too_many_within` there are too many ideals to enumerate. `other_work` are seconds of
    work besides pairs and prices.
    """

    unit_graph: UnitGraph
    seconds: float
    best: ScoredCut | None = None
    bound: int = 0
    is_proven: bool = False
    other_work: float = 0.0
    crossing: tuple[int, ...] = ()
    crossing_value: int = -1
    too_many_within: Limit | None = None

    @property
    def problem(self) -> PartitionProblem:
        """The problem that is solved."""
        return self.unit_graph.problem

    @cached_property
    def priced_search(self) -> PricedSearch:
        """The search over chains with priced stages, and its budget."""
        pairs = int(self.seconds * PAIRS_PER_SECOND)
        prices = int(self.seconds / self._price_seconds)
        return PricedSearch(self.problem, prices + 4 * self.problem.k, pairs_limit=pairs)

    @property
    def _price_seconds(self) -> float:
        """The seconds of work of one price, of a stage of mean size."""
        nodes = len(self.problem.graph.nodes) / self.problem.k
        return (nodes + PRICE_OVERHEAD_NODES) / NODES_PRICED_PER_SECOND

    @property
    def spent(self) -> float:
        """Seconds of work so far."""
        prices = len(self.priced_search.prices) * self._price_seconds
        return self.other_work + self.priced_search.pairs / PAIRS_PER_SECOND + prices

    @property
    def limit(self) -> Limit:
        """The limit within which cuts are as good as the best so far."""
        if self.best is None:
            return Limit()
        value = self.best.value[0]
        if self.problem.objective == "variance":
            # Σ load² of 100 also says that no load is above 10: see `Limit.load`.
            return Limit(squares=value, crossing=self.crossing)
        if self.problem.objective == "total-load":
            # One rank may have nearly all of it, so that it limits no load.
            return Limit(crossing=self.crossing)
        return Limit(most=value, crossing=self.crossing)

    def result(self, explained: bool) -> Partition:
        """Return the best cut, scored from the graph alone.

        Raise InfeasibleError if there is none.
        """
        if self.best is None:
            reason = "no cut was found"
            if explained:
                reason = why_infeasible(self.unit_graph, proven=self.is_proven)
            raise InfeasibleError(reason)
        best, assignment = self.best, self.unit_graph.assignment(self.best.stages)
        # Checked by code that shares nothing with the search but the problem.
        violation = next(violations(self.problem, assignment), None)
        assert violation is None, f"the search gave a cut that is not allowed: {violation}"
        return Partition.of(
            self.problem,
            assignment,
            method=best.method,
            bound=best.value[0] if self.is_proven else self.bound,
            extra_ns=best.extra_ns,
            replicas=best.replicas,
        )

    def is_close(self) -> bool:
        """Return whether the best cut is so near the bound that a better one does not matter."""
        if self.best is None:
            return False
        value = self.best.value[0]
        return (value - self.bound) * CLOSE_PARTS <= value

    def check_if_proven(self) -> bool:
        """Return whether the search is over, after the best cut or the bound may have changed."""
        meets_bound = self.best is not None and self.best.value[0] == self.bound
        self.is_proven = self.is_proven or (meets_bound and self.priced_search.is_complete)
        return self.is_proven

    # -- keeping cuts

    def take(self, chains: Chains, chain: Chain, method: str) -> None:
        """Keep the cut of a chain if it is better than the best so far."""
        replicas = None if self.problem.replica_ranks is None else chain.replicas
        extra_ns = self.priced_search.extra_ns(chains.family, chain)
        self.keep(stages_of(chains, chain), replicas, extra_ns, method)

    def keep(
        self,
        stages: tuple[int, ...],
        replicas: tuple[int, ...] | None,
        extra_ns: Mapping[int, int],
        method: str,
    ) -> None:
        """Keep a cut if it is better than the best so far; `method` is what found it."""
        loads = stage_loads(self.problem, self.unit_graph.assignment(stages), replicas)
        value = self.value_of([load + extra_ns.get(s, 0) for s, load in enumerate(loads)])
        if self.best is None or value < self.best.value:
            self.best = ScoredCut(stages, value, replicas, extra_ns, method)

    def value_of(self, loads: Sequence[int]) -> tuple[int, int]:
        """Return the value of the loads of stages by the objective, then by another one."""
        values = measures(rank_loads(self.problem, loads))
        squares, most = values["sum_of_squares_ns2"], values["max_load_ns"]
        if self.problem.objective == "total-load":
            return sum(loads), most
        return (squares, most) if self.problem.objective == "variance" else (most, squares)

    def is_allowed(self, stages: Sequence[int]) -> bool:
        """Return whether a cut meets all constraints.

        It is False if stages are priced, since that takes long.
        """
        memory = self.problem.memory
        if memory is not None and memory.price is not None:
            return False
        return next(violations(self.problem, self.unit_graph.assignment(stages)), None) is None


def stages_of(chains: Chains, chain: Chain) -> tuple[int, ...]:
    """Return the stage of each unit: how many of the boundaries 1 … k − 1 it lies behind."""
    stages = np.zeros(chains.family.unit_graph.count, np.intp)
    for row in chain.rows[1:]:
        stages += ~chains.family.members(row)
    return tuple(stages.tolist())
