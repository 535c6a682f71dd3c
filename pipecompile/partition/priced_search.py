"""The best chain where stages must pay to fit their memory, with as few prices as possible.

Prices are asked for one by one, of the stages that the search comes to choose. Stages without a
price are charged a lower bound of it (see `payments`), so the best chain is a lower bound of all
chains; it is the answer once all of its stages are priced and it is still the best:

    best chain      its charges      new prices       next
    A | B | C       0 + 3 + 0        B costs 9        B is charged 9 from now on
    A'| B'| C       0 + 4 + 1        B' costs 4,      all charges are prices: the answer
                                     A', C as charged

If that takes too many prices, stages without a price are guessed to hold more than their lower
bound (`Payments.guess`), and in the end only priced stages are allowed. Then the answer is not
proven best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pipecompile.partition.boundaries import Boundaries
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.memory_constraint import Price, StageCandidate
from pipecompile.partition.payments import StageKey
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.windows import Limit

__all__ = ["PricedSearch"]

# A family is searched without guesses for 1 / 16 of all prices, and with them for 1 / 3.
PARTS_WITHOUT_GUESSES = 16
PARTS_WITH_GUESSES = 3

UnitsKey = tuple[int, bytes, bytes]  # a stage by number and by the units before and until its end


@dataclass
class PricedSearch:
    """The search for the best chain with its stages priced, over one family after another.

    `limit` is about the most prices that are asked for, and `pairs_limit` the most pairs that
    chains are searched among; `pairs` counts them. `prices` are known.

    `is_complete` tells whether the last answer is proven the best of its family. If it is not,
    `lower_chain` is a chain with the charges of its stages that no chain of the family is better
    than, if one is known. `is_exact` turns false with the first price that may be too high.
    """

    problem: PartitionProblem
    limit: int
    prices: dict[UnitsKey, Price] = field(default_factory=dict)
    is_complete: bool = True
    is_exact: bool = True
    lower_chain: tuple[Chain, dict[int, int]] | None = None
    pairs_limit: int = 1 << 62
    pairs: int = 0

    def best(self, chains: Chains, limit: Limit) -> Chain | None:
        """Return the best chain within the limit, prices included; None if there is none."""
        memory, prices_at_start = self.problem.memory, len(self.prices)
        payments = chains.payments
        self.lower_chain = None
        while True:
            self.pairs += chains.pairs(limit)
            chain = chains.best(self.problem.objective, limit)
            # A price that may be too high makes a chain look worse than it is.
            is_certain = payments.is_certain and (self.is_exact or not payments.priced)
            self.is_complete = is_certain
            if chain is None or memory is None or memory.price is None:
                return chain
            charges = {key: payments.charged_ns(*key) for key in _stage_keys(chain)}
            if is_certain:
                self.lower_chain = chain, {key[0]: ns for key, ns in charges.items()}
            unpriced = [key for key in charges if key not in payments.priced]
            # All of them are priced, also after one whose price is higher than its charge.
            are_as_charged = [self._costs_at_most(chains, key, charges[key]) for key in unpriced]
            if all(are_as_charged):
                self.is_complete = is_certain and self.is_exact
                return chain
            priced = len(self.prices) - prices_at_start
            if self.is_spent or priced > self.limit // PARTS_WITH_GUESSES:
                payments.only_priced = True
            elif priced > self.limit // PARTS_WITHOUT_GUESSES:
                payments.guess()

    @property
    def is_spent(self) -> bool:
        """Whether no more stages are priced."""
        return len(self.prices) >= self.limit or self.pairs > self.pairs_limit

    def _costs_at_most(self, chains: Chains, key: StageKey, charged_ns: int) -> bool:
        """Price a stage, and return whether it pays no more than it was charged."""
        price = self.price_ns(chains.family, *key)
        chains.payments.pay(*key, price)
        return price is not None and price <= charged_ns

    def price_ns(self, family: Boundaries, stage: int, a: int, b: int) -> int | None:
        """Return what the units between two ideals pay as `stage`, in ns.

        It is None if they cannot fit, or if the price is unknown and no more may be asked for.
        """
        memory, before, until = self.problem.memory, family.members(a), family.members(b)
        assert memory is not None and memory.price is not None
        # By units and not by rows: a later family may have the same stage in other rows.
        key = (stage, before.tobytes(), until.tobytes())
        if key in self.prices:
            return self.prices[key].ns
        if len(self.prices) >= self.limit:
            return None
        units = family.unit_graph.units
        inside = until & ~before
        price = memory.price(
            StageCandidate(
                stage=stage,
                before=tuple(name for unit in before.nonzero()[0] for name in units[unit]),
                nodes=tuple(name for unit in inside.nonzero()[0] for name in units[unit]),
                in_flight=memory.in_flight[stage],
                cap=memory.caps[self.problem.stage_ranks[stage]],
            )
        )
        self.prices[key] = price
        self.is_exact = self.is_exact and price.ns == price.least
        return price.ns

    def extra_ns(self, family: Boundaries, chain: Chain) -> dict[int, int]:
        """Return what each stage of a chain pays, in ns per microbatch; empty without prices."""
        if self.problem.memory is None or self.problem.memory.price is None:
            return {}
        return {key[0]: self.price_ns(family, *key) or 0 for key in _stage_keys(chain)}


def _stage_keys(chain: Chain) -> Iterator[StageKey]:
    return ((stage, a, b) for stage, (a, b) in enumerate(pairwise(chain.rows)))
