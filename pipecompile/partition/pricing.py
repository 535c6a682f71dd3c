"""Stages that must pay to fit their memory: priced one by one, as the search comes to choose them.

A stage that was not priced yet counts as free, so the best chain so far is a bound; it is the answer once all of its
stages are priced and it is still the best.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipecompile.partition.boundaries import Boundaries
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.problem import Candidate, Problem
from pipecompile.partition.windows import Limit

__all__ = ["Pricing"]

Key = tuple[int, bytes, bytes]


@dataclass
class Pricing:
    """The best chain with its stages priced; `asked` counts prices, of which there are at most `limit`.

    `complete` turns false when that is reached: chains are then the best of those whose price is known.
    """

    problem: Problem
    limit: int
    known: dict[Key, int | None] = field(default_factory=dict)
    complete: bool = True
    pairs_limit: int = 1 << 62
    pairs: int = 0  # that chains were made of

    def best(self, chains: Chains, limit: Limit) -> Chain | None:
        """The best chain within the limit, prices included; None if there is none."""
        while True:
            self.pairs += chains.pairs(limit)
            chain = chains.best(self.problem.objective, limit)
            if chain is None or self.problem.memory is None or self.problem.memory.price is None:
                return chain
            stages = [(s, a, b) for s, (a, b) in enumerate(zip(chain.rows, chain.rows[1:], strict=False))]
            new = [stage for stage in stages if stage not in chains.priced]
            if not new:
                return chain
            if self.pairs > self.pairs_limit:
                self.complete = False
                return None
            for stage in new:
                chains.pay(*stage, self.price(chains.family, *stage))

    def price(self, family: Boundaries, stage: int, a: int, b: int) -> int | None:
        """What the units between two ideals pay as `stage`; a stage that can no longer be asked for cannot be."""
        memory, before, until = self.problem.memory, family.contains(a), family.contains(b)
        assert memory is not None and memory.price is not None
        key = (stage, before.tobytes(), until.tobytes())
        if key not in self.known and len(self.known) >= self.limit:
            self.complete = False
            return None
        if key not in self.known:
            units = family.instance.units
            self.known[key] = memory.price(
                Candidate(
                    stage=stage,
                    before=tuple(name for unit in before.nonzero()[0] for name in units[unit]),
                    nodes=tuple(name for unit in (until & ~before).nonzero()[0] for name in units[unit]),
                    in_flight=memory.in_flight[stage],
                    budget=memory.caps[self.problem.stage_ranks[stage]],
                )
            )
        return self.known[key]

    def extra_ns(self, family: Boundaries, chain: Chain) -> dict[int, int]:
        """What each stage of a chain pays."""
        if self.problem.memory is None or self.problem.memory.price is None:
            return {}
        pairs = enumerate(zip(chain.rows, chain.rows[1:], strict=False))
        return {stage: self.price(family, stage, a, b) or 0 for stage, (a, b) in pairs}
