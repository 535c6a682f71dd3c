"""What each stage computes again: by the policy that the options name, or what fits its rank at the least extra time.

Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypedDict

from pipecompile.api.ordering import stand_in
from pipecompile.ir.allocator import ALLOCATORS, Allocator
from pipecompile.ir.footprint import NOTHING, Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.holding import footprint_of
from pipecompile.ir.lives import Lives
from pipecompile.ir.memory import Moment, moments, rank_memory, spare
from pipecompile.ir.modules import block_of
from pipecompile.ir.plan import Options
from pipecompile.ir.tape import Tape
from pipecompile.ir.taping import tape_of
from pipecompile.memory.regions import Region
from pipecompile.schedule.named import SPLIT, generate

__all__ = ["NOTHING_AGAIN", "Again", "Recomputing", "moments_of"]

REFINING_SECONDS = 1.0  # of work on the regions of one stage
TRIES = 6  # as less memory is allowed, where the peak of regions is not that of the order


class Again(NamedTuple):
    """What a stage computes again, all of it or regions, and what it holds then.

    `ns` is the extra time. Of what fits its rank nothing is proven to take less than `least`.
    """

    kind: Literal["none", "stage", "except-last", "regions"]
    regions: tuple[tuple[str, ...], ...]
    ns: int
    least: int
    footprint: Footprint


class _Fit(NamedTuple):
    """What regions are chosen for: a stage and its blocks, the microbatches in flight, and the bytes they may take."""

    tape: Tape
    blocks: Sequence[str]
    in_flight: int
    available: int


class _Step(TypedDict):
    """What the memory of a rank hangs on besides its stages and its moments."""

    microbatches: int
    allocator: Allocator


NOTHING_AGAIN = Again("none", (), 0, 0, NOTHING)


@dataclass(frozen=True)
class Recomputing:
    """The choice for the stages of one graph, placed on ranks; each rank holds one where memory decides.

    While cuts are compared choices must be quick; once they are `settled`, they are worth a longer search.
    """

    graph: CostGraph
    options: Options
    placement: tuple[int, ...]
    settled: bool = False
    known: dict[tuple[object, ...], Again | None] = field(default_factory=dict, repr=False, compare=False)

    def of(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None) -> Again | None:
        """What stage `index` computes again to hold at most `cap` bytes; None if it cannot."""
        asked = index, tuple(before), tuple(nodes), cap
        if asked not in self.known:
            self.known[asked] = self._of(*asked)
        return self.known[asked]

    def _of(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None) -> Again | None:
        plain = Again("none", (), 0, 0, footprint_of(self.lives, before, nodes))
        policy = self.options.recompute
        if policy == "auto":
            return self._cheapest(index, before, nodes, cap, plain)
        if index == self.options.k - 1 or policy == "none" or (policy, self.options.microbatches) == ("except-last", 1):
            return plain
        if policy in ("stage", "except-last"):
            return self._whole(plain, nodes, policy)
        return self._by_policy(before, nodes)

    def _by_policy(self, before: Sequence[str], nodes: Sequence[str]) -> Again:
        """Regions by hand: each block of the model, or about √n of n blocks together."""
        from pipecompile.memory.choose import per_block, priced, square_root

        tape, blocks = self._tape(before, nodes, summed=True), self._blocks(nodes)
        regions = per_block(tape, blocks) if self.options.recompute == "block" else square_root(tape, blocks)
        ns = priced(tape, regions).ns
        return self._again(before, nodes, regions, ns, ns)

    def _whole(self, plain: Again, nodes: Sequence[str], kind: Literal["stage", "except-last"]) -> Again:
        ns = sum(self.graph.by_name[name].forward_ns for name in nodes)
        return plain._replace(kind=kind, ns=ns, least=ns)

    def _cheapest(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None, plain: Again
    ) -> Again | None:
        over = 0 if cap is None else self._total(index, plain) - cap
        if cap is None or over <= 0:
            return plain
        if self.options.schedule in (*SPLIT, "search"):  # eager stages that split their backwards have no regions
            stage = self._whole(plain, nodes, "stage")
            return stage if index < self.options.k - 1 and self._total(index, stage) <= cap else None
        return self._fitting(index, before, nodes, cap, plain.footprint)

    def _fitting(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, plain: Footprint
    ) -> Again | None:
        """The cheapest regions by the tape's peak; as long as that of the order is too high, with less memory."""
        from pipecompile.memory.bound import least_ns
        from pipecompile.memory.choose import cheapest, is_exact

        fit = self._fit(index, before, nodes, cap, plain)
        least = None if fit is None else least_ns(fit.tape, fit.in_flight, fit.available)
        if fit is None or least is None:
            return None
        for attempt in range(TRIES):
            choice = cheapest(*fit)
            if choice is None:
                return None
            exact = attempt == 0 and is_exact(fit.tape)
            found = self._again(before, nodes, choice.regions, choice.ns, choice.ns if exact else least)
            over = self._total(index, found) - cap
            if over <= 0:
                return self._refined(index, before, nodes, cap, fit, found) if self.settled else found
            fit = fit._replace(available=fit.available - over)
        return None

    def _fit(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, plain: Footprint) -> _Fit | None:
        """By the backward that begins with the most microbatches in flight; None if there is none to keep them for."""
        limits = list(spare({index: plain}, index, cap, self._moments(index), **self._step))
        if not limits:
            return None
        tight = max(limits, key=lambda limit: (limit.in_flight, limit.summed, -limit.bytes))
        tape = self._tape(before, nodes, summed=bool(tight.summed))
        return _Fit(tape, self._blocks(nodes), tight.in_flight, tight.bytes)

    def _refined(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, fit: _Fit, found: Again
    ) -> Again:
        """By integer programming, which also finds a better bound; `found` if that is not better."""
        from pipecompile.memory.choose import priced
        from pipecompile.memory.refine import refined

        place = {name: position for position, name in enumerate(nodes)}
        known = [Region(place[region[0]], place[region[-1]] + 1) for region in found.regions]
        if found.ns == found.least:
            return found
        regions, bound = refined(fit.tape, fit.in_flight, fit.available, known, REFINING_SECONDS)
        least = max(found.least, bound)
        assert regions is not None
        better = self._again(before, nodes, regions, priced(fit.tape, regions).ns, least)
        fits = better.ns < found.ns and self._total(index, better) <= cap
        return better if fits else found._replace(least=min(least, found.ns))

    def _again(
        self, before: Sequence[str], nodes: Sequence[str], regions: Iterable[tuple[int, int]], ns: int, least: int
    ) -> Again:
        named = tuple(tuple(nodes[start:stop]) for start, stop in regions)
        return Again("regions" if named else "none", named, ns, least, footprint_of(self.lives, before, nodes, named))

    def _total(self, index: int, again: Again) -> int:
        """What the rank may hold at its peak, under the named schedule or the one that stands in for a search."""
        at = self._moments(index, again.kind == "stage")
        return rank_memory({index: again.footprint}, at, **self._step).total.bound

    def _moments(self, index: int, again: bool = False) -> tuple[Moment, ...]:
        name = stand_in(self.options, self.placement)
        return moments_of(name, self.placement, self.options.microbatches, again)[self.placement[index]]

    @property
    def _step(self) -> _Step:
        return {"microbatches": self.options.microbatches, "allocator": ALLOCATORS[self.graph.memory]}

    def _tape(self, before: Sequence[str], nodes: Sequence[str], *, summed: bool) -> Tape:
        return tape_of(self.lives, before, nodes, summed=summed)

    def _blocks(self, nodes: Sequence[str]) -> list[str]:
        return [block_of(self.graph.by_name[name].module) for name in nodes]

    @cached_property
    def lives(self) -> Lives:
        """The storages of the graph."""
        return Lives(self.graph, self.options.optimizer, self.options.master_weights)


@lru_cache(maxsize=8)
def moments_of(
    name: str, placement: tuple[int, ...], microbatches: int, again: bool, but_last: bool = False
) -> tuple[tuple[Moment, ...], ...]:
    """Per rank the moments of a named schedule at which it may hold most; `again` if its stages recompute.

    `but_last` if the step's last microbatch is not computed again.
    """
    return tuple(map(moments, generate(name, placement, microbatches, again, but_last=but_last).rows))
