"""The search for the best cut by Σ load², Σ load or the largest load: which method runs when.

Each method starts from the best cut so far, and the search ends when a cut is proven best:

    1  several topological orders, cut into intervals         a good cut in milliseconds
    2  every ideal that the windows of that cut leave         the best cut, proven, if they are few
    3  shuffled orders, and all ideals near the best cut      better cuts where ideals are many
    4  minimum cuts of what must cross each boundary          a lower bound, and narrower windows
    5  CP-SAT on the whole graph                              a lower bound, perhaps a better cut

2 to 5 run twice, with a small and a large share of the budget. Stages that share ranks are handled
by hill climbing and CP-SAT alone, since no chain of stages knows the load of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipecompile.errors import InfeasibleError
from pipecompile.ir.links import FREE
from pipecompile.partition.bottlenecks import proves_no_fit
from pipecompile.partition.budget import (
    CUT_UNITS_PER_SECOND,
    IDEALS_PER_SECOND,
    INTEGER_SHARE,
    NODES_PRICED_PER_SECOND,
    PAIRS_PER_SECOND,
    PRICE_OVERHEAD_NODES,
    ROUND_SECONDS,
    SECONDS,
    SHIFTS_PER_SECOND,
    UNITS_PER_SECOND,
)
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.coarsening import coarse_groups
from pipecompile.partition.infeasibility import why_infeasible
from pipecompile.partition.lattice import Sides, every_cut, nearby_cuts, nearby_sides
from pipecompile.partition.local_search import climb
from pipecompile.partition.objective import lower_bound, measures, rank_loads, stage_loads
from pipecompile.partition.orders import shuffled_order, topological_order, topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.shared_ranks import BoundaryShifts, can_shift
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.violations import violations
from pipecompile.partition.windows import Limit

__all__ = ["PartitionSearch"]


class _BudgetShares(NamedTuple):
    """Parts of the budget for one round of methods."""

    nearby: float
    every_ideal: float
    integer: float


class _FamilySearch(NamedTuple):
    """What the search of one family took of the budget, and whether it would find more.

    A search that is not complete finds the same again unless more than these prices are known.
    """

    seconds: float
    pairs: int
    is_complete: bool
    prices: int


ROUNDS = (_BudgetShares(0.1, 0.1, 0.1), _BudgetShares(0.2, 0.2, 0.5))
FIRST_EXACT_SHARE = 0.02  # of the budget, for all ideals right after the first cut
CLOSE_PARTS = 100_000  # costs are not exact to this part of a value, so no search continues for it
CPSAT_SIZE_MAX = 30_000  # units × stages of what CP-SAT is given as a whole
REACH = 64  # units on both sides of a boundary that may change its side, at first
MIN_CUT_TESTS = 6
SHIFTED = "boundary-shifts"  # the method of cuts that `shared_ranks` found


@dataclass(frozen=True)
class _ScoredCut:
    """The stage of each unit, and the cut's value by the objective and then by another one."""

    stages: tuple[int, ...]
    value: tuple[int, int]
    replicas: tuple[int, ...] | None
    extra_ns: Mapping[int, int]
    method: str


@dataclass
class PartitionSearch:
    """The state of a search: the best cut so far, a lower bound, and the work done.

    `is_proven`: no cut is better, or there is no cut. `crossing` bounds what every cut as good as
    the best sends over each boundary; `crossing_value` is the value for which it was computed.
    Within `too_many_within` there are too many ideals to enumerate. `other_work` are seconds of
    work besides pairs and prices.
    """

    unit_graph: UnitGraph
    seconds: float
    best: _ScoredCut | None = None
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
            return Limit(squares=value, crossing=self.crossing)
        if self.problem.objective == "total-load":
            # One rank may have nearly all of it, so that it limits no load.
            return Limit(crossing=self.crossing)
        return Limit(most=value, crossing=self.crossing)

    # The course of the search

    def run(self) -> None:
        """Run all methods in turn, until a cut is proven best or near enough to the bound."""
        self.bound = lower_bound(self.problem)
        if proves_no_fit(self.unit_graph):
            self.is_proven = True
            return
        if self.problem.ranks != self.problem.k:
            self._try_shared_ranks()
            return
        if self.priced_search.limit < self.unit_graph.count and self.problem.memory is not None:
            self._try_between_blocks()
        else:
            self._try_orders()
        # Also if the bound is met: of cuts with that value, one may be better by the other
        # objective.
        self._try_every_ideal(FIRST_EXACT_SHARE)
        low, high = self.unit_graph.pin_windows
        if low == high:
            return  # pins leave one cut
        for shares in ROUNDS:
            for method, share in (
                (self._try_nearby_cuts, shares.nearby),
                (self._raise_bound, 0.0),
                (self._try_every_ideal, shares.every_ideal),
                (self._try_integer_program, shares.integer),
            ):
                if not self.is_proven and not self._is_close():
                    method(share)

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

    def _is_close(self) -> bool:
        """Return whether the best cut is so near the bound that a better one does not matter."""
        if self.best is None:
            return False
        value = self.best.value[0]
        return (value - self.bound) * CLOSE_PARTS <= value

    def _check_if_proven(self) -> bool:
        """Return whether the search is over, after the best cut or the bound may have changed."""
        meets_bound = self.best is not None and self.best.value[0] == self.bound
        self.is_proven = self.is_proven or (meets_bound and self.priced_search.is_complete)
        return self.is_proven

    # Keeping cuts

    def _take(self, chains: Chains, chain: Chain, method: str) -> None:
        """Keep the cut of a chain if it is better than the best so far."""
        replicas = None if self.problem.replica_ranks is None else chain.replicas
        extra_ns = self.priced_search.extra_ns(chains.family, chain)
        self._keep(_stages_of(chains, chain), replicas, extra_ns, method)

    def _keep(
        self,
        stages: tuple[int, ...],
        replicas: tuple[int, ...] | None,
        extra_ns: Mapping[int, int],
        method: str,
    ) -> None:
        loads = stage_loads(self.problem, self.unit_graph.assignment(stages), replicas)
        value = self._value([load + extra_ns.get(s, 0) for s, load in enumerate(loads)])
        if self.best is None or value < self.best.value:
            self.best = _ScoredCut(stages, value, replicas, extra_ns, method)

    def _value(self, loads: Sequence[int]) -> tuple[int, int]:
        """Return the value of the loads of stages by the objective, then by another one."""
        values = measures(rank_loads(self.problem, loads))
        squares, most = values["sum_of_squares_ns2"], values["max_load_ns"]
        if self.problem.objective == "total-load":
            return sum(loads), most
        return (squares, most) if self.problem.objective == "variance" else (most, squares)

    # 1: topological orders

    def _try_orders(self) -> None:
        """Cut several orders; a graph that has only one order is solved by it."""
        for order in topological_orders(self.unit_graph):
            self._try_order(order)
            if self._check_if_proven() or self.spent > self.seconds / 2:
                return

    def _try_order(self, order: Sequence[int]) -> None:
        prefixes = Prefixes(self.unit_graph, order)
        chain = cut_order(prefixes, self.limit, self.priced_search.best)
        self.other_work += ROUND_SECONDS + len(order) / UNITS_PER_SECOND
        if chain is not None:
            self._take(Chains(prefixes), chain, "linear-dp")

    def _try_between_blocks(self) -> None:
        """Keep the best cut between blocks, where too few stages can be priced.

        Later methods then move its boundaries by single units. Without a cut, orders are tried.
        """
        together = (*self.problem.together, *coarse_groups(self.problem.graph, "blocks"))
        coarse = replace(self.problem, granularity="operators", together=together)
        with suppress(InfeasibleError):
            search = PartitionSearch(UnitGraph.of(coarse), self.seconds / 2)
            search._try_orders()
            if search.best is not None:
                assignment = search.unit_graph.assignment(search.best.stages)
                stages = tuple(assignment[unit[0]] for unit in self.unit_graph.units)
                self._keep(stages, search.best.replicas, search.best.extra_ns, "linear-dp")
        if self.best is None:
            self._try_orders()

    # 2: all ideals

    def _try_every_ideal(self, share: float) -> None:
        """Find the best of all cuts, if all ideals fit into memory and a share of the budget."""
        if self.limit == self.too_many_within:
            return
        chains = every_cut(self.unit_graph, self.limit, min(1.0, self.seconds / SECONDS))
        self.too_many_within = self.limit if chains is None else None
        if chains is None or chains.pairs(self.limit) > share * self.seconds * PAIRS_PER_SECOND:
            return
        chain = self.priced_search.best(chains, self.limit)
        if chain is not None:
            self._take(chains, chain, "ideal-dp")
        self.is_proven = self.priced_search.is_complete
        self._raise_bound_by_charges(chains)
        if self.is_proven and self.best is not None:
            # The method that proved the cut, whichever found it.
            self.best = replace(self.best, method="ideal-dp")

    def _raise_bound_by_charges(self, chains: Chains) -> None:
        """Raise the bound where not all prices are known.

        No cut is better than the best chain with the lower bounds that its stages were charged.
        """
        if self.priced_search.lower_chain is None or self.best is None:
            return
        chain, charges = self.priced_search.lower_chain
        assignment = self.unit_graph.assignment(_stages_of(chains, chain))
        loads = stage_loads(self.problem, assignment)
        value = self._value([load + charges[stage] for stage, load in enumerate(loads)])[0]
        self.bound = max(self.bound, min(value, self.best.value[0]))

    # 3: ideals near the best cut

    def _try_nearby_cuts(self, share: float) -> None:
        """Shuffle the order inside the stages and search all ideals near the best cut.

        Where few orders differ near the boundaries, the same ideals come again. They cost the
        budget as much as before and are searched once.
        """
        random, reach = np.random.default_rng(int(1000 * share)), REACH
        searched = dict[tuple[bytes, ...], _FamilySearch]()
        until = self.spent + share * self.seconds
        while (
            self.best is not None
            and self.spent < until
            and not self._check_if_proven()
            and not self.priced_search.is_spent
        ):
            order = shuffled_order(self.unit_graph, self.best.stages, random)
            sizes = np.bincount(self.best.stages, minlength=self.problem.k)
            rows = [0, *np.cumsum(sizes).tolist()]
            sides = nearby_sides(self.unit_graph, order, rows, reach)
            self.other_work += ROUND_SECONDS + len(order) / UNITS_PER_SECOND
            known, key = len(self.priced_search.prices), _key_of(sides)
            work = searched.get(key)
            if work is not None and (work.is_complete or work.prices == known):
                self._charge(work)
                continue
            chains = nearby_cuts(self.unit_graph, sides)
            pairs_max = self.seconds * PAIRS_PER_SECOND / 10
            if chains is None or chains.pairs(self.limit) > pairs_max:
                reach = max(1, reach // 2)
                continue
            pairs_before = self.priced_search.pairs
            self.other_work += (ideals_seconds := len(chains.family) / IDEALS_PER_SECOND)
            chain = self.priced_search.best(chains, self.limit)
            if chain is not None:
                self._take(chains, chain, "linear-dp")
            searched[key] = _FamilySearch(
                ideals_seconds,
                self.priced_search.pairs - pairs_before,
                self.priced_search.is_complete,
                known,
            )

    def _charge(self, work: _FamilySearch) -> None:
        """Charge the budget for a search that would be repeated, and answer as it did."""
        self.other_work += work.seconds
        self.priced_search.pairs += work.pairs
        self.priced_search.is_complete = work.is_complete

    # 4: minimum cuts

    def _raise_bound(self, _: float) -> None:
        """Raise the bound by what must cross each boundary, which leaves fewer ideals as well."""
        if self.best is None or self.problem.communication != "relay":
            return
        if self.crossing_value == self.best.value[0]:
            return
        # Imported where it is needed: OR-tools takes a second to load.
        from pipecompile.partition.min_cut_bound import min_cut_bound, with_crossing_bounds

        self.crossing_value = self.best.value[0]
        size = self.unit_graph.count * self.problem.k
        self.crossing = with_crossing_bounds(self.unit_graph, self.limit).crossing
        tests = min(MIN_CUT_TESTS, int(self.seconds * CUT_UNITS_PER_SECOND / size))
        bound = min_cut_bound(self.unit_graph, self.limit, self.bound, tests)
        self.bound = max(self.bound, bound)
        self.other_work += (tests + 1) * size / CUT_UNITS_PER_SECOND / 4
        self._check_if_proven()

    # 5: the integer program

    def _try_integer_program(self, share: float) -> None:
        """Give the whole graph to CP-SAT: for a bound, and perhaps a better cut."""
        memory, size = self.problem.memory, self.unit_graph.count * self.problem.k
        if memory is not None and memory.freeable:
            return  # it knows less of memory than the dynamic program
        if size > CPSAT_SIZE_MAX or self.problem.replica_ranks is not None:
            return
        if len(self.problem.graphs) > 1:
            return  # it knows one time of each unit
        # Imported where it is needed: OR-tools takes a second to load.
        from pipecompile.partition.cpsat import COARSE, FINE, solve_integer_program

        # Squares of fine times are too large for the solver.
        time_units = COARSE if self.problem.objective == "variance" else FINE
        budget = share * self.seconds * INTEGER_SHARE[self.problem.objective]
        known = None if self.best is None else self.best.stages
        solution = solve_integer_program(self.unit_graph, known, self.limit, budget, time_units)
        self.other_work += share * self.seconds
        # It bounds the cuts within the limit, none of which is worth more than the best cut.
        bound = solution.bound
        if self.best is not None:
            bound = min(bound, self.best.value[0])
        self.bound = max(self.bound, bound)
        if solution.stages is not None and self._is_allowed(solution.stages):
            self._keep(solution.stages, None, {}, "cp-sat")
        self._check_if_proven()

    def _is_allowed(self, stages: Sequence[int]) -> bool:
        """Return whether a cut meets all constraints.

        It is False if stages are priced, since that takes long.
        """
        memory = self.problem.memory
        if memory is not None and memory.price is not None:
            return False
        return next(violations(self.problem, self.unit_graph.assignment(stages)), None) is None

    # Ranks with several stages

    def _try_shared_ranks(self) -> None:
        """Start from a cut into stages alone on their ranks, climb, and try CP-SAT."""
        alone = replace(self.problem, placement=None, speeds=None, memory=None, links=FREE)
        # Without memory, since caps are for ranks and not for stages.
        search = PartitionSearch(UnitGraph(alone, self.unit_graph.units), self.seconds / 4)
        search._try_orders()
        if search.best is not None:
            start = self._shift_boundaries if can_shift(self.problem) else self._climb
            start(search.best.stages)
        low, high = self.unit_graph.pin_windows
        if self._check_if_proven() or self._is_close() or low == high:
            return
        self._try_integer_program(0.5)
        # Boundaries that were shifted have no better place, unless CP-SAT found another cut.
        if self.best is not None and self.best.method != SHIFTED:
            self._climb(self.best.stages)
        self._check_if_proven()

    def _shift_boundaries(self, stages: tuple[int, ...]) -> None:
        """Keep the cut to which moves of runs of boundaries lead from these stages."""
        order = topological_order(self.unit_graph, lambda unit: (stages[unit], unit))
        shifts = BoundaryShifts(Prefixes(self.unit_graph, order))
        steps = int(self.seconds * SHIFTS_PER_SECOND / self.problem.k**2)
        shifted = shifts.best(stages, steps)
        if self._is_allowed(shifted):
            self._keep(shifted, None, {}, SHIFTED)
        else:
            self._climb(shifted)

    def _climb(self, stages: tuple[int, ...]) -> None:
        evaluations = int(self.seconds * UNITS_PER_SECOND / 8 / self.unit_graph.count)
        climbed = climb(self.unit_graph, stages, self._allowed_value, evaluations)
        if self._allowed_value(climbed) is not None:
            self._keep(climbed, None, {}, "linear-dp")

    def _allowed_value(self, stages: tuple[int, ...]) -> tuple[int, int] | None:
        if not self._is_allowed(stages):
            return None
        return self._value(stage_loads(self.problem, self.unit_graph.assignment(stages)))


def _key_of(sides: Sequence[Sides]) -> tuple[bytes, ...]:
    return tuple(units.tobytes() for side in sides for units in side)


def _stages_of(chains: Chains, chain: Chain) -> tuple[int, ...]:
    """Return the stage of each unit: how many of the boundaries 1 … k − 1 it lies behind."""
    stages = np.zeros(chains.family.unit_graph.count, np.intp)
    for row in chain.rows[1:]:
        stages += ~chains.family.members(row)
    return tuple(stages.tolist())
