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

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipecompile.errors import InfeasibleError
from pipecompile.ir.links import FREE
from pipecompile.partition.bottlenecks import proves_no_fit
from pipecompile.partition.budget import (
    CUT_UNITS_PER_SECOND,
    IDEALS_PER_SECOND,
    INTEGER_SHARE,
    PAIRS_PER_SECOND,
    ROUND_SECONDS,
    SECONDS,
    SHIFTS_PER_SECOND,
    UNITS_PER_SECOND,
)
from pipecompile.partition.chains import Chains
from pipecompile.partition.coarsening import coarse_groups
from pipecompile.partition.lattice import Sides, every_cut, nearby_cuts, nearby_sides
from pipecompile.partition.local_search import climb
from pipecompile.partition.objective import lower_bound, stage_loads
from pipecompile.partition.orders import shuffled_order, topological_order, topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.search_state import SearchState, stages_of
from pipecompile.partition.shared_ranks import BoundaryShifts, can_shift
from pipecompile.partition.unit_graph import UnitGraph

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
CPSAT_SIZE_MAX = 30_000  # units × stages of what CP-SAT is given as a whole
REACH = 64  # units on both sides of a boundary that may change its side, at first
MIN_CUT_TESTS = 6
SHIFTED = "boundary-shifts"  # the method of cuts that `shared_ranks` found


class PartitionSearch(SearchState):
    """A search for the best cut: `run`, and then `result`."""

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
                if not self.is_proven and not self.is_close():
                    method(share)

    # 1: topological orders

    def _try_orders(self) -> None:
        """Cut several orders; a graph that has only one order is solved by it."""
        for order in topological_orders(self.unit_graph):
            self._try_order(order)
            if self.check_if_proven() or self.spent > self.seconds / 2:
                return

    def _try_order(self, order: Sequence[int]) -> None:
        prefixes = Prefixes(self.unit_graph, order)
        chain = cut_order(prefixes, self.limit, self.priced_search.best)
        self.other_work += ROUND_SECONDS + len(order) / UNITS_PER_SECOND
        if chain is not None:
            self.take(Chains(prefixes), chain, "linear-dp")

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
                self.keep(stages, search.best.replicas, search.best.extra_ns, "linear-dp")
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
            self.take(chains, chain, "ideal-dp")
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
        assignment = self.unit_graph.assignment(stages_of(chains, chain))
        loads = stage_loads(self.problem, assignment)
        value = self.value_of([load + charges[stage] for stage, load in enumerate(loads)])[0]
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
            and not self.check_if_proven()
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
                self.take(chains, chain, "linear-dp")
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
        self.check_if_proven()

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
        if solution.stages is not None and self.is_allowed(solution.stages):
            self.keep(solution.stages, None, {}, "cp-sat")
        self.check_if_proven()

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
        if self.check_if_proven() or self.is_close() or low == high:
            return
        self._try_integer_program(0.5)
        # Boundaries that were shifted have no better place, unless CP-SAT found another cut.
        if self.best is not None and self.best.method != SHIFTED:
            self._climb(self.best.stages)
        self.check_if_proven()

    def _shift_boundaries(self, stages: tuple[int, ...]) -> None:
        """Keep the cut to which moves of runs of boundaries lead from these stages."""
        order = topological_order(self.unit_graph, lambda unit: (stages[unit], unit))
        shifts = BoundaryShifts(Prefixes(self.unit_graph, order))
        steps = int(self.seconds * SHIFTS_PER_SECOND / self.problem.k**2)
        shifted = shifts.best(stages, steps)
        if self.is_allowed(shifted):
            self.keep(shifted, None, {}, SHIFTED)
        else:
            self._climb(shifted)

    def _climb(self, stages: tuple[int, ...]) -> None:
        evaluations = int(self.seconds * UNITS_PER_SECOND / 8 / self.unit_graph.count)
        climbed = climb(self.unit_graph, stages, self._allowed_value, evaluations)
        if self._allowed_value(climbed) is not None:
            self.keep(climbed, None, {}, "linear-dp")

    def _allowed_value(self, stages: tuple[int, ...]) -> tuple[int, int] | None:
        if not self.is_allowed(stages):
            return None
        return self.value_of(stage_loads(self.problem, self.unit_graph.assignment(stages)))


def _key_of(sides: Sequence[Sides]) -> tuple[bytes, ...]:
    return tuple(units.tobytes() for side in sides for units in side)
