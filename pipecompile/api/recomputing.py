"""What each stage computes again: by the policy that the options name, or what fits its rank at the least extra time.

Needs no PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from pipecompile.api.ordering import flights, stand_in
from pipecompile.ir.allocator import ALLOCATORS, Allocator
from pipecompile.ir.footprint import NOTHING, Footprint
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.holding import footprint_of
from pipecompile.ir.lives import Lives
from pipecompile.ir.memory import rank_memory, spare
from pipecompile.ir.modules import block_of
from pipecompile.ir.moments import Moment, moments
from pipecompile.ir.plan import Options, Saving
from pipecompile.ir.saving import Policy
from pipecompile.ir.tape import Tape
from pipecompile.ir.taping import tape_of
from pipecompile.memory.regions import Region
from pipecompile.schedule.named import MAY_SPLIT, generate

if TYPE_CHECKING:
    from pipecompile.memory.saving import Offer

__all__ = ["NOTHING_AGAIN", "Again", "Recomputing", "moments_of"]

REFINING_SECONDS = 1.0  # of work on the regions of one stage
EXPONENTS = -80, 40  # of what a byte costs in ns, in half powers of two: next to nothing, and more than anything
ByHand = Literal["stage", "except-last", "block", "sqrt"]
TRIES = 12  # as less memory is allowed, where the peak of regions is not that of the order


class Again(NamedTuple):
    """What a stage computes again, all of it or regions, and what it holds then.

    `ns` is the extra time, with that of `saving`: runs of nodes outside of regions whose saved tensors lie in another
    form. It is proven that nothing that fits its rank, and treats all microbatches alike, takes less than `least`.
    """

    kind: Literal["none", "stage", "except-last", "regions"]
    regions: tuple[tuple[str, ...], ...]
    ns: int
    least: int
    footprint: Footprint
    saving: tuple[Saving, ...] = ()

    def mean_ns(self, microbatches: int) -> Fraction:
        """The extra time of a microbatch on average over a step."""
        spared = self.kind == "except-last"
        return Fraction(self.ns * (microbatches - spared), microbatches)


class _Fit(NamedTuple):
    """What regions are chosen for: a stage and its blocks, the microbatches in flight, and the bytes they may take.

    Other moments may leave less for what each keeps: `most_kept`, if they do.
    """

    tape: Tape
    blocks: Sequence[str]
    in_flight: int
    available: int
    most_kept: int | None = None

    def less(self, over: int, kept: int) -> _Fit:
        """For so many bytes less, where a microbatch kept so many: at the peak, and of each that is in flight."""
        return self._replace(available=self.available - over, most_kept=kept - -(-over // self.in_flight))


class _Step(TypedDict):
    """What the memory of a rank hangs on besides its stages and its moments."""

    microbatches: int
    allocator: Allocator


NOTHING_AGAIN = Again("none", (), 0, 0, NOTHING)


@dataclass(frozen=True)
class Recomputing:
    """The choice for the stages of one graph, placed on ranks.

    While cuts are compared choices must be quick; once they are `settled`, they are worth a longer search. If `waiting`
    stages that do not fit recompute as a whole, where they then can: it takes longer, but may run while a rank waits.
    """

    graph: CostGraph
    options: Options
    placement: tuple[int, ...]
    settled: bool = False
    waiting: bool = False
    known: dict[tuple[object, ...], Again | None] = field(default_factory=dict, repr=False, compare=False)

    def of_all(self, names: Sequence[tuple[str, ...]]) -> list[Again | None]:
        """What all stages compute again, by their nodes; None for those whose rank does not hold them, whatever it is.

        Each for itself; where memory decides and a rank holds several, these together, as little as they can if the
        rank does not hold them.
        """
        ranks = max(self.placement) + 1
        caps = self.options.caps(ranks)
        if self.options.recompute == "auto" and caps is not None and ranks < len(names):
            chosen: dict[int, Again | None] = {}
            for rank, cap in enumerate(caps):
                chosen |= self._of_rank([i for i, r in enumerate(self.placement) if r == rank], names, cap)
            return [chosen[index] for index in range(len(names))]
        given = (None,) * ranks if caps is None else caps
        return [self.of(i, _before(names, i), names[i], given[self.placement[i]]) for i in range(len(names))]

    def _of_rank(self, held: Sequence[int], names: Sequence[tuple[str, ...]], cap: int) -> Mapping[int, Again]:
        """Of the stages of a rank: what takes least, by any policy for all of them or each byte at one price.

        If nothing lets the rank fit, as little as there is.
        """
        plain = {i: self._plain(_before(names, i), names[i]) for i in held}
        if self._total(plain) <= cap:
            return plain
        choices = [self._all(plain, names, "stage")]
        if self._may_spare:
            choices.append(self._all(plain, names, "except-last"))
        if not self._splits:  # eager stages that split their backwards have no regions
            choices += [self._all(plain, names, "block"), self._all(plain, names, "sqrt")]
            choices.append(self._priced_alike(held, names, cap))
        fitting = [each for each in choices if self._total(each) <= cap]
        return min(fitting, key=self._mean_ns, default=choices[-1 if not self._splits else 0])

    def _all(self, plain: Mapping[int, Again], names: Sequence[tuple[str, ...]], policy: ByHand) -> dict[int, Again]:
        """All stages by a policy, but for the last."""
        chosen = {
            i: self._by_hand(again, _before(names, i), names[i], policy)._replace(least=0)
            for i, again in plain.items()
            if i < len(names) - 1
        }
        return {**plain, **chosen}

    def _by_hand(self, plain: Again, before: Sequence[str], nodes: Sequence[str], policy: ByHand) -> Again:
        match policy:
            case "stage" | "except-last":
                return self._whole(plain, nodes, policy)
            case "block" | "sqrt":
                return self._in_blocks(before, nodes, policy)

    def _mean_ns(self, stages: Mapping[int, Again]) -> Fraction:
        return sum((again.mean_ns(self.options.microbatches) for again in stages.values()), Fraction(0))

    def _priced_alike(self, held: Sequence[int], names: Sequence[tuple[str, ...]], cap: int) -> dict[int, Again]:
        """Each byte costs the same in all of them, as little as lets the rank fit."""
        low, high = EXPONENTS
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._total(self._at(held, names, middle)) <= cap
            low, high = (low, middle) if fits else (middle, high)
        return self._at(held, names, high)

    def _at(self, held: Sequence[int], names: Sequence[tuple[str, ...]], exponent: int) -> dict[int, Again]:
        """The stages of a rank where a byte costs 2^(exponent / 2) ns."""
        from pipecompile.memory.choose import weighed

        found: dict[int, Again] = {}
        in_flight = flights(self.options, self.placement)
        for index in held:
            before, nodes = _before(names, index), names[index]
            tape = self._tape(before, nodes, summed=self.options.microbatches > in_flight[index])
            choice = weighed(tape, self._blocks(nodes), in_flight[index], 2 ** (exponent / 2))
            found[index] = self._again(before, nodes, choice.regions, choice.ns, 0)
        return found

    def of(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None) -> Again | None:
        """What stage `index` computes again, or saves how, to hold at most `cap` bytes; None if it cannot."""
        asked = index, tuple(before), tuple(nodes), cap
        if asked not in self.known:
            self.known[asked] = self._of(*asked)
        return self.known[asked]

    def _of(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None) -> Again | None:
        plain = self._plain(before, nodes)
        found = self._recomputed(index, before, nodes, cap, plain)
        if not self.options.saving or cap is None or self._splits or self._total({index: plain}) <= cap:
            return found
        return self._or_saved(index, before, nodes, cap, plain, found)

    def _recomputed(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None, plain: Again
    ) -> Again | None:
        policy = self.options.recompute
        if policy == "auto":
            return self._cheapest(index, before, nodes, cap, plain)
        if index == self.options.k - 1 or policy == "none" or (policy, self.options.microbatches) == ("except-last", 1):
            return plain
        return self._by_hand(plain, before, nodes, policy)

    def _plain(self, before: Sequence[str], nodes: Sequence[str]) -> Again:
        return Again("none", (), 0, 0, footprint_of(self.lives, before, nodes))

    def _in_blocks(self, before: Sequence[str], nodes: Sequence[str], policy: Literal["block", "sqrt"]) -> Again:
        """Regions by hand: each block of the model, or about √n of n blocks together."""
        from pipecompile.memory.choose import per_block, priced, square_root

        tape, blocks = self._tape(before, nodes, summed=True), self._blocks(nodes)
        regions = (per_block if policy == "block" else square_root)(tape, blocks)
        ns = priced(tape, regions).ns
        return self._again(before, nodes, regions, ns, ns)

    def _whole(self, plain: Again, nodes: Sequence[str], kind: Literal["stage", "except-last"]) -> Again:
        ns = sum(self.graph.by_name[name].forward_ns for name in nodes)
        return plain._replace(kind=kind, ns=ns, least=ns)

    def _cheapest(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int | None, plain: Again
    ) -> Again | None:
        over = 0 if cap is None else self._total({index: plain}) - cap
        if cap is None or over <= 0:
            return plain
        stage = self._whole(plain, nodes, "stage")
        whole = stage if index < self.options.k - 1 and self._total({index: stage}) <= cap else None
        if whole and not self._splits:  # eager stages that split their backwards have no regions
            whole = whole._replace(least=0)  # regions may take less
        is_enough = whole and (self._splits or self.waiting)
        found = whole if is_enough or self._splits else self._fitting(index, before, nodes, cap, plain) or whole
        return found and self._or_but_last(index, nodes, cap, plain, found)

    def _or_but_last(self, index: int, nodes: Sequence[str], cap: int, plain: Again, found: Again) -> Again:
        """Everything for all microbatches but a step's last, if that fits and takes less."""
        if not self._may_spare or index == self.options.k - 1:
            return found
        spared = self._whole(plain, nodes, "except-last")._replace(least=0)
        takes_less = self._mean_ns({index: spared}) < self._mean_ns({index: found})
        return spared if takes_less and self._total({index: spared}) <= cap else found

    @property
    def _may_spare(self) -> bool:
        """Whether the last microbatch may be treated otherwise; proofs of cuts are of choices that treat all alike."""
        return self.settled and self.options.microbatches > 1 and self.options.schedule != "search"

    @property
    def _splits(self) -> bool:
        """Whether backwards may be split."""
        return self.options.schedule in MAY_SPLIT

    def _or_saved(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, plain: Again, recomputed: Again | None
    ) -> Again | None:
        """What takes least: that, or other forms; None if nothing fits. That no mixture takes less is not proven."""
        from pipecompile.memory.saving import offers

        exact = tuple(policy for policy in self.options.saving if policy != "half")
        for policies in dict.fromkeys((exact, self.options.saving)):
            offered = offers(self.lives, before, nodes, policies)
            known = [recomputed, *self._saved(index, before, nodes, cap, offered, plain, recomputed)]
            fitting = [again for again in known if again is not None and self._total({index: again}) <= cap]
            if fitting:  # what is not exact is for stages that nothing else lets fit
                return min(fitting, key=lambda again: again.ns)._replace(least=0)
        return None

    def _saved(
        self,
        index: int,
        before: Sequence[str],
        nodes: Sequence[str],
        cap: int,
        offers: Sequence[Offer],
        plain: Again,
        recomputed: Again | None,
    ) -> Iterator[Again | None]:
        """Other forms: as many as it takes, from the cheapest on, and those cheaper than regions, with these."""
        runs = tuple(offer.saving for offer in offers)

        def in_forms(count: int) -> Again:
            return self._again(before, nodes, (), 0, 0, runs[:count])

        def fits(count: int) -> bool:
            return self._total({index: in_forms(count)}) <= cap

        yield in_forms(bisect_left(range(len(runs)), True, key=fits))
        count = len(runs)
        if recomputed is not None:
            freed = plain.footprint.kept.bound - recomputed.footprint.kept.bound
            count = sum(offer.ns_per_byte * freed < recomputed.ns for offer in offers)
        if self.options.recompute == "auto" and count:
            yield self._fitting(index, before, nodes, cap, in_forms(count))

    def _fitting(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, plain: Again) -> Again | None:
        """The cheapest regions by the tape's peak; as long as that of the order is too high, with less memory.

        `plain` is the stage without any, as it may already save in other forms.
        """
        from pipecompile.memory.bound import least_ns
        from pipecompile.memory.choose import cheapest, is_exact
        from pipecompile.memory.nested import nested

        fit = self._fit(index, before, nodes, cap, plain)
        least = None if fit is None else least_ns(fit.tape, fit.in_flight, fit.available)
        if fit is None or least is None:
            return None
        for attempt in range(TRIES):
            # With one in flight regions within regions may take less, and of these not all are looked at.
            choice, exact = cheapest(*fit), attempt == 0 and is_exact(fit.tape) and fit.in_flight > 1
            if choice is None and fit.in_flight == 1:
                choice = nested(fit.tape, fit.blocks, fit.available)
            if choice is None:
                return None
            found = self._again(before, nodes, choice.regions, choice.ns, choice.ns if exact else least, plain.saving)
            over = self._total({index: found}) - cap
            if over <= 0:
                return self._refined(index, before, nodes, cap, fit, found) if self.settled else found
            fit = fit.less(over, choice.kept)
        return None

    def _fit(self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, plain: Again) -> _Fit | None:
        """By the backward that begins with the most microbatches in flight; None if there is none to keep them for."""
        limits = list(spare({index: plain.footprint}, index, cap, self._moments(index), **self._step))
        if not limits:
            return None
        tight = max(limits, key=lambda limit: (limit.in_flight, limit.summed, -limit.bytes))
        tape = self._tape(before, nodes, summed=bool(tight.summed), saving=plain.saving)
        return _Fit(tape, self._blocks(nodes), tight.in_flight, tight.bytes)

    def _refined(
        self, index: int, before: Sequence[str], nodes: Sequence[str], cap: int, fit: _Fit, found: Again
    ) -> Again:
        """By integer programming, which also finds a better bound, or with regions within others; or `found` as it is.

        That bound is for regions that lie side by side.
        """
        from pipecompile.memory.choose import priced
        from pipecompile.memory.nested import nested
        from pipecompile.memory.refine import refined

        if found.ns == found.least:
            return found
        choices, least = [], found.least - _ns_of(found.saving)
        if fit.in_flight == 1:
            choices = [nested(fit.tape, fit.blocks, fit.available)]
        else:
            place = {name: position for position, name in enumerate(nodes)}
            known = [Region(place[region[0]], place[region[-1]] + 1) for region in found.regions]
            regions, bound = refined(fit.tape, fit.in_flight, fit.available, known, REFINING_SECONDS)
            choices, least = [priced(fit.tape, regions or ())], max(least, bound)
        others = [
            self._again(before, nodes, each.regions, each.ns, least, found.saving)
            for each in choices
            if each is not None
        ]
        better = [other for other in others if other.ns < found.ns and self._total({index: other}) <= cap]
        least = min(least + _ns_of(found.saving), found.ns)
        return min(better, key=lambda other: other.ns, default=found._replace(least=least))

    def _again(
        self,
        before: Sequence[str],
        nodes: Sequence[str],
        regions: Iterable[tuple[int, int]],
        ns: int,
        least: int,
        saving: tuple[Saving, ...] = (),
    ) -> Again:
        """Regions that take `ns`, and at least `least`, and runs of nodes that save in other forms."""
        named = tuple(tuple(nodes[start:stop]) for start, stop in regions)
        saving = tuple(sorted(saving, key=lambda run: self.lives.place[run.nodes[0]]))
        footprint = footprint_of(self.lives, before, nodes, named, _policies(saving))
        more = _ns_of(saving)
        return Again("regions" if named else "none", named, ns + more, least + more, footprint, saving)

    def _total(self, stages: Mapping[int, Again | None]) -> int:
        """What the rank of these stages may hold at its peak, by the named schedule or that which stands in for one."""
        known = {index: again for index, again in stages.items() if again is not None}
        kinds = {again.kind for again in known.values()}
        at = self._moments(next(iter(known)), not kinds.isdisjoint(("stage", "except-last")), "except-last" in kinds)
        return rank_memory({index: again.footprint for index, again in known.items()}, at, **self._step).total.bound

    def _moments(self, index: int, again: bool = False, but_last: bool = False) -> tuple[Moment, ...]:
        """Of the rank of a stage."""
        name = stand_in(self.options, self.placement)
        return moments_of(name, self.placement, self.options.microbatches, again, but_last)[self.placement[index]]

    @property
    def _step(self) -> _Step:
        return {"microbatches": self.options.microbatches, "allocator": ALLOCATORS[self.graph.memory]}

    def _tape(
        self, before: Sequence[str], nodes: Sequence[str], *, summed: bool, saving: Sequence[Saving] = ()
    ) -> Tape:
        return tape_of(self.lives, before, nodes, summed=summed, saving=_policies(saving))

    def _blocks(self, nodes: Sequence[str]) -> list[str]:
        return [block_of(self.graph.by_name[name].module) for name in nodes]

    @cached_property
    def lives(self) -> Lives:
        """The storages of the graph."""
        return Lives(self.graph, self.options.optimizer, self.options.master_weights)


def _ns_of(saving: Iterable[Saving]) -> int:
    return sum(run.ns for run in saving)


def _policies(saving: Iterable[Saving]) -> list[tuple[tuple[str, ...], tuple[Policy, ...]]]:
    return [(run.nodes, run.policies) for run in saving]


def _before(names: Sequence[tuple[str, ...]], index: int) -> tuple[str, ...]:
    return tuple(chain.from_iterable(names[:index]))


@lru_cache(maxsize=8)
def moments_of(
    name: str, placement: tuple[int, ...], microbatches: int, again: bool, but_last: bool = False
) -> tuple[tuple[Moment, ...], ...]:
    """Per rank the moments of a named schedule at which it may hold most; `again` if its stages recompute.

    `but_last` if the step's last microbatch is not computed again.
    """
    return tuple(map(moments, generate(name, placement, microbatches, again, but_last=but_last).rows))
