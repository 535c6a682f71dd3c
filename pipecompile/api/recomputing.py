"""What each stage computes again: by the policy that the options name, or what fits its rank at the least extra time.

Needs no PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipecompile.api.ordering import flights, stand_in
from pipecompile.ir.allocator import ALLOCATORS
from pipecompile.ir.footprint import NOTHING, Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.holding import footprint_of
from pipecompile.ir.lives import Lives
from pipecompile.ir.memory import Moment, moments, rank_memory
from pipecompile.ir.modules import block_of
from pipecompile.ir.plan import Options, Saving
from pipecompile.ir.tape import Tape
from pipecompile.ir.taping import tape_of
from pipecompile.schedule.named import SPLIT, generate

if TYPE_CHECKING:
    from pipecompile.memory.saving import Offer

__all__ = ["NOTHING_AGAIN", "Again", "Recomputing", "moments_of"]

TRIES = 6  # as less memory is allowed, where the peak of regions is not that of the order


class Again(NamedTuple):
    """What a stage computes again, all of it or regions, and what it holds then; `ns` is the extra time.

    It counts those of `saving`, runs of nodes outside regions whose saved tensors lie in another form.
    """

    kind: Literal["none", "stage", "regions"]
    regions: tuple[tuple[str, ...], ...]
    ns: int
    footprint: Footprint
    saving: tuple[Saving, ...] = ()


NOTHING_AGAIN = Again("none", (), 0, NOTHING)


@dataclass(frozen=True)
class Recomputing:
    """The choice for the stages of one graph, placed on ranks; each rank holds one where memory decides."""

    graph: CostGraph
    options: Options
    placement: tuple[int, ...]

    def of(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None) -> Again | None:
        """What stage `index` computes again, or saves how, to hold at most `cap` bytes; None if it cannot."""
        plain = Again("none", (), 0, footprint_of(self.lives, before, nodes))
        found = self._recomputed(index, before, nodes, cap, plain)
        if not self.options.saving or cap is None or self._splits or self._total(index, plain) <= cap:
            return found
        from pipecompile.memory.saving import offers

        exact = tuple(policy for policy in self.options.saving if policy != "half")
        for policies in dict.fromkeys((exact, self.options.saving)):
            offered = offers(self.lives, before, nodes, policies)
            known = [
                *([] if found is None else [found]),
                *self._saved(index, before, nodes, cap, offered, plain, found),
            ]
            fitting = [again for again in known if self._total(index, again) <= cap]
            if fitting:  # what is not exact is for stages that nothing else lets fit
                return min(fitting, key=lambda again: again.ns)
        return found

    def _recomputed(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None, plain: Again
    ) -> Again | None:
        policy = self.options.recompute
        if policy == "auto":
            return self._cheapest(index, before, nodes, cap, plain)
        if index == self.options.k - 1 or policy == "none":
            return plain
        if policy == "stage":
            return plain._replace(kind="stage", ns=sum(self.graph.by_name[name].forward_ns for name in nodes))
        return self._by_policy(before, nodes)

    def _by_policy(self, before: Sequence[str], nodes: Sequence[str]) -> Again:
        """Regions by hand: each block of the model, or about √n of n blocks together."""
        from pipecompile.memory.choose import per_block, priced, square_root

        tape, blocks = self._tape(before, nodes, summed=True), self._blocks(nodes)
        regions = per_block(tape, blocks) if self.options.recompute == "block" else square_root(tape, blocks)
        return self._again(before, nodes, regions, priced(tape, regions).ns)

    def _cheapest(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None, plain: Again
    ) -> Again | None:
        over = 0 if cap is None else self._total(index, plain) - cap
        if cap is None or over <= 0:
            return plain
        if self._splits:  # eager stages that split their backwards have no regions
            stage = plain._replace(kind="stage", ns=sum(self.graph.by_name[name].forward_ns for name in nodes))
            return stage if index < self.options.k - 1 and self._total(index, stage) <= cap else None
        return self._fitting(index, before, nodes, cap, plain.footprint)

    @property
    def _splits(self) -> bool:
        """Whether backwards may be split."""
        return self.options.schedule in (*SPLIT, "search")

    def _saved(
        self,
        index: int,
        before: Sequence[str],
        nodes: Sequence[str],
        cap: int,
        offers: Sequence[Offer],
        plain: Again,
        recomputed: Again | None,
    ) -> Iterator[Again]:
        """Other forms: as many as it takes, from the cheapest on, and those cheaper than regions, with these."""
        runs = tuple(offer.saving for offer in offers)

        def fits(count: int) -> bool:
            return self._total(index, self._in_forms(before, nodes, runs[:count])) <= cap

        yield self._in_forms(before, nodes, runs[: bisect_left(range(len(runs)), True, key=fits)])
        if self.options.recompute == "auto":
            cheap = runs
            if recomputed is not None:
                freed = plain.footprint.kept.bound - recomputed.footprint.kept.bound
                cheap = tuple(offer.saving for offer in offers if offer.ns_per_byte * freed < recomputed.ns)
            again = self._fitting(index, before, nodes, cap, self._in_forms(before, nodes, cheap).footprint, cheap)
            yield from [] if again is None else [again]

    def _in_forms(self, before: Sequence[str], nodes: Sequence[str], runs: tuple[Saving, ...]) -> Again:
        return self._again(before, nodes, (), 0, runs)

    def _fitting(
        self,
        index: int,
        before: Sequence[str],
        nodes: Sequence[str],
        cap: int,
        plain: Footprint,
        saving: tuple[Saving, ...] = (),
    ) -> Again | None:
        """The cheapest regions by the tape's peak; as long as that of the order is too high, with less memory."""
        from pipecompile.memory.choose import cheapest

        in_flight = self._flights[index]
        tape = self._tape(before, nodes, summed=self.options.microbatches > in_flight, saving=saving)
        kept = plain.kept.bound
        available = (in_flight - 1) * kept + max(plain.forward_peak.bound, kept + plain.backward_peak.bound)
        over = self._total(index, Again("none", (), 0, plain)) - cap
        for _ in range(TRIES):
            available -= over
            choice = cheapest(tape, self._blocks(nodes), in_flight, available)
            if choice is None:
                return None
            found = self._again(before, nodes, choice.regions, choice.ns, saving)
            over = self._total(index, found) - cap
            if over <= 0:
                return found
        return None

    def _again(
        self,
        before: Sequence[str],
        nodes: Sequence[str],
        regions: Iterable[tuple[int, int]],
        ns: int,
        saving: tuple[Saving, ...] = (),
    ) -> Again:
        named = tuple(tuple(nodes[start:stop]) for start, stop in regions)
        saving = tuple(sorted(saving, key=lambda run: self.lives.place[run.nodes[0]]))
        footprint = footprint_of(self.lives, before, nodes, named, [(run.nodes, run.policies) for run in saving])
        return Again("regions" if named else "none", named, ns + sum(run.ns for run in saving), footprint, saving)

    def _total(self, index: int, again: Again) -> int:
        """What the rank may hold at its peak, under the named schedule or the one that stands in for a search."""
        options, name = self.options, stand_in(self.options, self.placement)
        at = moments_of(name, self.placement, options.microbatches, again.kind == "stage")[self.placement[index]]
        allocator = ALLOCATORS[self.graph.memory]
        memory = rank_memory({index: again.footprint}, at, microbatches=options.microbatches, allocator=allocator)
        return memory.total.bound

    def _tape(
        self, before: Sequence[str], nodes: Sequence[str], *, summed: bool, saving: tuple[Saving, ...] = ()
    ) -> Tape:
        runs = [(run.nodes, run.policies) for run in saving]
        return tape_of(self.lives, before, nodes, summed=summed, saving=runs)

    def _blocks(self, nodes: Sequence[str]) -> list[str]:
        return [block_of(self.graph.by_name[name].module) for name in nodes]

    @cached_property
    def lives(self) -> Lives:
        """The storages of the graph."""
        return Lives(self.graph, self.options.optimizer, self.options.master_weights)

    @cached_property
    def _flights(self) -> tuple[int, ...]:
        return flights(self.options, self.placement)


@lru_cache(maxsize=8)
def moments_of(name: str, placement: tuple[int, ...], microbatches: int, again: bool) -> tuple[tuple[Moment, ...], ...]:
    """Per rank the moments of a named schedule at which it may hold most; `again` if its stages recompute."""
    return tuple(map(moments, generate(name, placement, microbatches, again).rows))
