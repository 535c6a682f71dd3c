"""The partitioner: picks methods, hands the best cut from one to the next, and says what is proven.

First the cuts of several orders. What they reach bounds where each unit can lie; if the ideals that are left can be
listed, the best chain of them is proven best. Otherwise the orders are shuffled inside the stages and the
neighbourhood of the best cut is listed, over and over, and CP-SAT works on the whole. The budget is counted in steps
and not in seconds, so the same input gives the same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipecompile.errors import InfeasibleError
from pipecompile.ir.links import FREE
from pipecompile.partition.boundaries import Prefixes
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.check import faults
from pipecompile.partition.explain import why_infeasible
from pipecompile.partition.hierarchy import kept_together
from pipecompile.partition.instance import Instance
from pipecompile.partition.lattice import every_cut, nearby
from pipecompile.partition.linear import cut_order
from pipecompile.partition.local_search import climb
from pipecompile.partition.objective import lower_bound, measures, rank_loads, stage_loads
from pipecompile.partition.orders import orders, reordered
from pipecompile.partition.pricing import Pricing
from pipecompile.partition.problem import Problem
from pipecompile.partition.result import Partition
from pipecompile.partition.windows import Limit

__all__ = ["solve"]

SECONDS = 10.0  # of work on a problem, unless told otherwise
SHARES = (
    (0.1, 0.1, 0.1),
    (0.2, 0.2, 0.5),
)  # of the budget: what lies near the best cut, all ideals, CP-SAT
PAIRS_PER_SECOND = 6_000_000  # that a search looks at, on one core of 2020 or later
IDEALS_PER_SECOND = 1_000_000  # that are listed
CUTS_PER_SECOND = 100_000  # units times boundaries, for which minimum cuts are found
UNITS_PER_SECOND = 40_000  # that are put in order and laid out
ROUND = 0.005  # seconds that each round takes besides
INTEGER_SHARE = {
    "max-load": 0.3,
    "variance": 0.1,
}  # CP-SAT's deterministic second takes three to ten
CLOSE = 100_000  # a value is not worth more search if it is within this part of the bound: costs are not so exact
INTEGER_SIZE = 30_000  # units × stages of what CP-SAT is given as a whole
NODES_PRICED_PER_SECOND = 4_000
NODES_OF_A_PRICE = 60  # that take as long as a price does besides
STEPS_PER_SECOND = 2_500  # actions that are simulated


def solve(problem: Problem, *, seconds: float = SECONDS, explained: bool = True) -> Partition:
    """The best cut that about `seconds` of work find, with a bound; the same one every time.

    InfeasibleError says which constraint cannot be met, where, and by how much; unless it is to be `explained`, which
    may take longer than the search, only that there is no cut.
    """
    if problem.granularity == "auto":
        from pipecompile.partition.opening import solve_opening

        return solve_opening(problem, seconds, explained=explained)[0]
    if problem.objective == "step-time":
        return _fastest_step(problem, seconds, explained)
    search = _Search(Instance.of(problem), seconds)
    search.run()
    return search.result(explained)


@dataclass(frozen=True)
class _Cut:
    """The stage of each unit; what it is worth, by the objective and then the other one."""

    stages: tuple[int, ...]
    value: tuple[int, int]
    replicas: tuple[int, ...] | None
    extra_ns: Mapping[int, int]
    method: str


@dataclass
class _Search:
    instance: Instance
    seconds: float
    best: _Cut | None = None
    bound: int = 0
    done: bool = False
    other_work: float = 0.0
    crossing: tuple[
        int, ...
    ] = ()  # what every cut as good as the best sends over each boundary, at the least
    bounded_at: int = -1  # the value for which minimum cuts were found
    too_many: Limit | None = None  # a limit within which there are too many ideals to list

    @property
    def problem(self) -> Problem:
        return self.instance.problem

    @cached_property
    def pricing(self) -> Pricing:
        pairs, prices = (
            int(self.seconds * PAIRS_PER_SECOND),
            int(self.seconds / self._price_seconds),
        )
        return Pricing(self.problem, prices + 4 * self.problem.k, pairs_limit=pairs)

    @property
    def _price_seconds(self) -> float:
        """What a price takes, of a stage of mean size."""
        return (
            len(self.problem.graph.nodes) / self.problem.k + NODES_OF_A_PRICE
        ) / NODES_PRICED_PER_SECOND

    @property
    def spent(self) -> float:
        """Seconds of work so far."""
        prices = len(self.pricing.known) * self._price_seconds
        return self.other_work + self.pricing.pairs / PAIRS_PER_SECOND + prices

    @property
    def limit(self) -> Limit:
        """What a cut must not exceed to be as good as the best so far."""
        if self.best is None:
            return Limit()
        value = self.best.value[0]
        if self.problem.objective == "variance":
            return Limit(squares=value, crossing=self.crossing)
        return Limit(most=value, crossing=self.crossing)

    def run(self) -> None:
        """All methods in turn, each from the best cut so far, until one is proven best."""
        self.bound = lower_bound(self.problem)
        if self.problem.ranks != self.problem.k:
            self._shared_ranks()
            return
        if self.pricing.limit < self.instance.count and self.problem.memory is not None:
            self._between_blocks()
        else:
            self._linear()
        self._exact(
            0.02
        )  # also where the bound is met: of equal cuts the one that is better by the other objective
        low, high = self.instance.windows
        if low == high:
            return  # pins leave one cut
        for near, every, integer in SHARES:
            for step, share in (
                (self._refine, near),
                (self._bound, 0.0),
                (self._exact, every),
                (self._integer, integer),
            ):
                if not self.done and not self._is_close():
                    step(share)

    def result(self, explained: bool) -> Partition:
        """The best cut, scored from the graph alone."""
        if self.best is None:
            why = (
                why_infeasible(self.instance, proven=self.done) if explained else "no cut was found"
            )
            raise InfeasibleError(why)
        assignment, cut = self.instance.assignment(self.best.stages), self.best
        wrong = next(faults(self.problem, assignment), None)
        assert wrong is None, f"the search gave a cut that is not allowed: {wrong}"
        return Partition.of(
            self.problem,
            assignment,
            method=cut.method,
            bound=cut.value[0] if self.done else self.bound,
            extra_ns=cut.extra_ns,
            replicas=cut.replicas,
        )

    def _linear(self) -> None:
        """Several orders; a graph that has only one is then solved."""
        for order in orders(self.instance):
            self._try_order(order)
            if self._is_met() or self.spent > self.seconds / 2:
                return

    def _between_blocks(self) -> None:
        """Where too few stages can be priced: the best cut between blocks, whose ends then move by single units."""
        closed = kept_together(self.problem.graph, "blocks")
        between = replace(
            self.problem, granularity="operators", together=(*self.problem.together, *closed)
        )
        with suppress(InfeasibleError):
            first = _Search(Instance.of(between), self.seconds / 2)
            first._linear()
            if first.best is not None:
                found = first.instance.assignment(first.best.stages)
                stages = tuple(found[unit[0]] for unit in self.instance.units)
                self._keep(stages, first.best.replicas, first.best.extra_ns, "linear-dp")
        if self.best is None:
            self._linear()

    def _is_close(self) -> bool:
        """Whether what is left to gain is too little to search for."""
        return (
            self.best is not None
            and (self.best.value[0] - self.bound) * CLOSE <= self.best.value[0]
        )

    def _is_met(self) -> bool:
        self.done = self.done or (
            self.best is not None and self.best.value[0] == self.bound and self.pricing.complete
        )
        return self.done

    def _try_order(self, order: Sequence[int]) -> None:
        prefixes = Prefixes(self.instance, order)
        found = cut_order(prefixes, self.limit, self.pricing.best)
        self.other_work += ROUND + len(order) / UNITS_PER_SECOND
        if found is not None:
            self._take(Chains(prefixes), found, "linear-dp")

    def _take(self, chains: Chains, chain: Chain, method: str) -> None:
        """Keeps a chain if it is better than the best so far."""
        replicas = None if self.problem.replica_ranks is None else chain.replicas
        self._keep(
            _stages_of(chains, chain), replicas, self.pricing.extra_ns(chains.family, chain), method
        )

    def _keep(
        self,
        stages: tuple[int, ...],
        replicas: tuple[int, ...] | None,
        extra_ns: Mapping[int, int],
        method: str,
    ) -> None:
        loads = stage_loads(self.problem, self.instance.assignment(stages), replicas)
        loads = tuple(load + extra_ns.get(stage, 0) for stage, load in enumerate(loads))
        value = self._value(loads)
        if self.best is None or value < self.best.value:
            self.best = _Cut(stages, value, replicas, extra_ns, method)

    def _value(self, loads: Sequence[int]) -> tuple[int, int]:
        found = measures(rank_loads(self.problem, loads))
        both = found["sum_of_squares_ns2"], found["max_load_ns"]
        return both if self.problem.objective == "variance" else both[::-1]

    def _exact(self, share: float) -> None:
        """Every cut that is as good as the best so far, if they can be listed in a share of the budget."""
        if self.limit == self.too_many:
            return
        chains = every_cut(self.instance, self.limit, min(1.0, self.seconds / SECONDS))
        self.too_many = self.limit if chains is None else None
        if chains is None or chains.pairs(self.limit) > share * self.seconds * PAIRS_PER_SECOND:
            return
        found = self.pricing.best(chains, self.limit)
        if found is not None:
            self._take(chains, found, "ideal-dp")
        self.done = self.pricing.complete
        self._bound_by_least(chains)
        if self.done and self.best is not None:
            self.best = replace(self.best, method="ideal-dp")  # what proved it

    def _bound_by_least(self, chains: Chains) -> None:
        """Where prices are not all known: nothing among all cuts is better than the best with what stages may pay."""
        if self.pricing.least is not None and self.best is not None:
            chain, taken = self.pricing.least
            loads = stage_loads(self.problem, self.instance.assignment(_stages_of(chains, chain)))
            value = self._value([load + taken[stage] for stage, load in enumerate(loads)])[0]
            self.bound = max(self.bound, min(value, self.best.value[0]))

    def _refine(self, share: float) -> None:
        """Shuffles the order inside the stages and lists what lies near the best cut, for a share of the budget."""
        random, reach = np.random.default_rng(int(1000 * share)), 64
        until = self.spent + share * self.seconds
        while (
            self.best is not None
            and self.spent < until
            and not self._is_met()
            and not self.pricing.is_spent
        ):
            order = reordered(self.instance, self.best.stages, random)
            rows = [0, *np.cumsum(np.bincount(self.best.stages, minlength=self.problem.k)).tolist()]
            chains = nearby(self.instance, order, rows, reach)
            self.other_work += ROUND + len(order) / UNITS_PER_SECOND
            pairs = 0 if chains is None else chains.pairs(self.limit)
            if chains is None or pairs > self.seconds * PAIRS_PER_SECOND / 10:
                reach = max(1, reach // 2)
                continue
            self.other_work += len(chains.family) / IDEALS_PER_SECOND
            found = self.pricing.best(chains, self.limit)
            if found is not None:
                self._take(chains, found, "linear-dp")

    def _bound(self, _: float) -> None:
        """A better bound from what must cross each boundary, which also leaves fewer ideals to list."""
        if (
            self.best is None
            or self.problem.communication != "relay"
            or self.bounded_at == self.best.value[0]
        ):
            return
        from pipecompile.partition.min_cut_bound import crossing_bound, informed

        self.bounded_at = self.best.value[0]
        size = self.instance.count * self.problem.k
        self.crossing = informed(self.instance, self.limit).crossing
        tests = min(6, int(self.seconds * CUTS_PER_SECOND / size))
        self.bound = max(self.bound, crossing_bound(self.instance, self.limit, self.bound, tests))
        self.other_work += (tests + 1) * size / CUTS_PER_SECOND / 4
        self._is_met()

    def _integer(self, share: float) -> None:
        """CP-SAT on the whole graph: a bound where there was none, and perhaps a better cut."""
        memory = self.problem.memory
        if memory is not None and memory.freeable:
            return  # it would choose by memory alone, and know no more of it than the dynamic program
        if (
            self.instance.count * self.problem.k > INTEGER_SIZE
            or self.problem.replica_ranks is not None
        ):
            return
        from pipecompile.partition.cpsat import COARSE, FINE, solve_integer

        # Squares of fine times are too large for the solver.
        time_units = FINE if self.problem.objective == "max-load" else COARSE
        budget = share * self.seconds * INTEGER_SHARE[self.problem.objective]
        known = None if self.best is None else self.best.stages
        answer = solve_integer(self.instance, known, self.limit, budget, time_units)
        self.other_work += share * self.seconds
        self.bound = max(
            self.bound, min(answer.bound, self.best.value[0]) if self.best else answer.bound
        )
        if answer.stages is not None and self._allowed(answer.stages):
            self._keep(answer.stages, None, {}, "cp-sat")
        self._is_met()

    def _allowed(self, stages: Sequence[int]) -> bool:
        """Stages that must pay for their memory are left to the dynamic program."""
        memory = self.problem.memory
        free = memory is None or memory.price is None
        return free and next(faults(self.problem, self.instance.assignment(stages)), None) is None

    def _shared_ranks(self) -> None:
        """Several stages a rank: the load that counts is the rank's sum, which no chain of stages knows."""
        start = replace(self.problem, placement=None, speeds=None, memory=None, links=FREE)
        first = _Search(Instance(start, self.instance.units), self.seconds / 4)
        first._linear()
        if first.best is not None:
            self._climb(first.best.stages)
        self._integer(0.5)
        if self.best is not None:
            self._climb(self.best.stages)
        self._is_met()

    def _climb(self, stages: tuple[int, ...]) -> None:
        evaluations = int(self.seconds * UNITS_PER_SECOND / 8 / self.instance.count)
        found = climb(self.instance, stages, self._allowed_value, evaluations)
        if self._allowed_value(found) is not None:
            self._keep(found, None, {}, "linear-dp")

    def _allowed_value(self, stages: tuple[int, ...]) -> tuple[int, int] | None:
        if not self._allowed(stages):
            return None
        return self._value(stage_loads(self.problem, self.instance.assignment(stages)))


def _stages_of(chains: Chains, chain: Chain) -> tuple[int, ...]:
    """The stage of each unit."""
    stages = np.zeros(chains.family.instance.count, np.intp)
    for row in chain.rows[1:]:
        stages += ~chains.family.contains(row)
    return tuple(stages.tolist())


def _fastest_step(problem: Problem, seconds: float, explained: bool) -> Partition:
    """The cuts that the other objectives find, and what hill climbing on the simulated step makes of the best."""
    assert problem.step_ns is not None
    step_ns, least = problem.step_ns, replace(problem, objective="max-load", step_ns=None)
    cuts = [
        solve(
            replace(least, objective=objective, communication=communication),
            seconds=seconds / 4,
            explained=explained,
        )
        for objective, communication in (
            ("variance", problem.communication),
            ("max-load", problem.communication),
            ("max-load", "none"),
        )
    ]
    bound = lower_bound(problem)
    if problem.whole_backwards:
        bound = max(bound, problem.microbatches * cuts[-1].search.bound)
    best = min(cuts, key=lambda cut: step_ns(cut.assignment)).assignment
    instance = Instance.of(problem)

    def value(stages: tuple[int, ...]) -> int | None:
        assignment = instance.assignment(stages)
        return None if next(faults(problem, assignment), None) else step_ns(assignment)

    stages = tuple(best[unit[0]] for unit in instance.units)
    evaluations = int(seconds * STEPS_PER_SECOND / (problem.k * problem.microbatches))
    found = climb(instance, stages, value, evaluations)
    return Partition.of(problem, instance.assignment(found), method="linear-dp", bound=bound)
