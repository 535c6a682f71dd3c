"""Stages that must pay to fit their memory: priced one by one, as the search comes to choose them.

A stage that was not priced yet pays the least that it may, so the best chain so far is a bound; it is the answer once
all of its stages are priced and it is still the best. If that takes too many prices, stages that were not priced yet
are guessed to need as much memory besides as the one last priced in their place; in the end only known prices count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pipecompile.partition.boundaries import Boundaries
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.communication import Stage
from pipecompile.partition.problem import Candidate, Price, Problem
from pipecompile.partition.windows import Limit

__all__ = ["Pricing"]

Key = tuple[int, bytes, bytes]
SURE, SHARE = (
    16,
    3,
)  # parts of the prices that there may be: for a family without guesses, and with them


@dataclass
class Pricing:
    """The best chain with its stages priced; of `known` prices there are at most about `limit`.

    `complete` tells whether the last answer is proven the best of its family; if it is not, nothing in the family is
    better than the chain `least` with the prices that its stages were taken to have. `exact` turns false with the first
    price that may be too high.
    """

    problem: Problem
    limit: int
    known: dict[Key, Price] = field(default_factory=dict)
    complete: bool = True
    exact: bool = True
    least: tuple[Chain, dict[int, int]] | None = None
    pairs_limit: int = 1 << 62
    pairs: int = 0  # that chains were made of

    def best(self, chains: Chains, limit: Limit) -> Chain | None:
        """The best chain within the limit, prices included; None if there is none."""
        memory, start, self.least = self.problem.memory, len(self.known), None
        payments = chains.payments
        while True:
            self.pairs += chains.pairs(limit)
            chain = chains.best(self.problem.objective, limit)
            certain = payments.certain and (self.exact or not payments.priced)
            self.complete = certain
            if chain is None or memory is None or memory.price is None:
                return chain
            taken = {stage: payments.taken(*stage) for stage in _stages(chain)}
            if certain:
                self.least = chain, {number: taken[number, a, b] for number, a, b in taken}
            new = [stage for stage in taken if stage not in payments.priced]
            pays = [self._pays(chains, stage, taken[stage]) for stage in new]
            if all(pays):
                self.complete = certain and self.exact
                return chain
            asked = len(self.known) - start
            if self.is_spent or asked > self.limit // SHARE:
                payments.closed = True
            elif asked > self.limit // SURE:
                payments.guess()

    @property
    def is_spent(self) -> bool:
        """Whether no more stages are priced."""
        return len(self.known) >= self.limit or self.pairs > self.pairs_limit

    def _pays(self, chains: Chains, stage: Stage, taken: int) -> bool:
        """Whether a stage that is now priced pays no more than it was taken to."""
        price = self.price(chains.family, *stage)
        chains.payments.pay(*stage, price)
        return price is not None and price <= taken

    def price(self, family: Boundaries, stage: int, a: int, b: int) -> int | None:
        """What the units between two ideals pay as `stage`; a stage that can no longer be asked for cannot be."""
        memory, before, until = self.problem.memory, family.contains(a), family.contains(b)
        assert memory is not None and memory.price is not None
        key = (stage, before.tobytes(), until.tobytes())
        if key not in self.known and len(self.known) >= self.limit:
            return None
        if key not in self.known:
            units = family.instance.units
            found = memory.price(
                Candidate(
                    stage=stage,
                    before=tuple(name for unit in before.nonzero()[0] for name in units[unit]),
                    nodes=tuple(
                        name for unit in (until & ~before).nonzero()[0] for name in units[unit]
                    ),
                    in_flight=memory.in_flight[stage],
                    budget=memory.caps[self.problem.stage_ranks[stage]],
                )
            )
            self.known[key], self.exact = found, self.exact and found.ns == found.least
        return self.known[key].ns

    def extra_ns(self, family: Boundaries, chain: Chain) -> dict[int, int]:
        """What each stage of a chain pays."""
        if self.problem.memory is None or self.problem.memory.price is None:
            return {}
        return {stage: self.price(family, stage, a, b) or 0 for stage, a, b in _stages(chain)}


def _stages(chain: Chain) -> Iterator[Stage]:
    return ((stage, a, b) for stage, (a, b) in enumerate(pairwise(chain.rows)))
