"""What each stage computes again: by the policy that the options name, or what fits its rank at the least extra time.

Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options
from pipecompile.recompute.budget import StageBudget
from pipecompile.recompute.policies import (
    ByHand,
    RecomputePolicies,
    StageRecompute,
    StageSlice,
    stage_slices,
)
from pipecompile.recompute.schedule_view import ScheduleView

__all__ = ["RecomputePlanner"]

EXPONENTS = (
    -80,
    40,
)  # of what a byte costs in ns, in half powers of two: next to nothing, and more than anything


@dataclass(frozen=True)
class RecomputePlanner:
    """The choice for the stages of one graph, placed on ranks.

    While cuts are compared choices must be quick; once they are `settled`, they are worth a longer search. If `waiting`
    stages that do not fit recompute as a whole, where they then can: it takes longer, but may run while a rank waits.
    """

    graph: CostGraph
    options: Options
    view: ScheduleView
    settled: bool = False
    waiting: bool = False
    known: dict[tuple[StageSlice, int | None], StageRecompute | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def of_all(self, names: Sequence[tuple[str, ...]]) -> list[StageRecompute | None]:
        """What all stages compute again, by their nodes; None for those whose rank does not hold them, whatever it is.

        Each for itself; where memory decides and a rank holds several, these together, as little as they can if the
        rank does not hold them.
        """
        ranks, every = self.view.ranks, stage_slices(names)
        caps = self.options.caps(ranks)
        if self.options.recompute == "auto" and caps is not None and ranks < len(names):
            chosen: dict[int, StageRecompute | None] = {}
            for rank, cap in enumerate(caps):
                chosen |= self._of_rank(
                    [piece for piece in every if self.view.placement[piece.stage] == rank], cap
                )
            return [chosen[piece.stage] for piece in every]
        given = (None,) * ranks if caps is None else caps
        return [self.of(piece, given[self.view.placement[piece.stage]]) for piece in every]

    def _of_rank(self, held: Sequence[StageSlice], cap: int) -> Mapping[int, StageRecompute]:
        """Of the stages of a rank: what takes least, by any policy for all of them or each byte at one price.

        If nothing lets the rank fit, as little as there is.
        """
        plain = {piece.stage: self.policies.plain(piece) for piece in held}
        if self.policies.total(plain) <= cap:
            return plain
        choices = [plain, self._all(held, plain, "stage")]
        if self.waiting and self.policies.total(choices[-1]) <= cap:
            return choices[-1]
        choices += [self._all(held, plain, "except-last")] if self._may_spare else []
        if not self.view.may_split:
            choices += [
                self._all(held, plain, "block"),
                self._all(held, plain, "sqrt"),
                self._priced_alike(held, cap),
            ]
        return min(
            choices,
            key=lambda each: (max(0, self.policies.total(each) - cap), self.policies.mean_ns(each)),
        )

    def _all(
        self, held: Sequence[StageSlice], plain: Mapping[int, StageRecompute], policy: ByHand
    ) -> dict[int, StageRecompute]:
        """The stages of a rank by a policy; that nothing takes less is not proven."""
        every = {
            piece.stage: self.policies.by_hand(piece, policy, plain[piece.stage]) for piece in held
        }
        return {index: again._replace(least=0) for index, again in every.items()}

    def _priced_alike(self, held: Sequence[StageSlice], cap: int) -> dict[int, StageRecompute]:
        """Each byte costs the same in all of them, as little as lets the rank fit."""
        low, high = EXPONENTS
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.policies.total(self._at(held, middle)) <= cap
            low, high = (low, middle) if fits else (middle, high)
        return self._at(held, high)

    def _at(self, held: Sequence[StageSlice], exponent: int) -> dict[int, StageRecompute]:
        """The stages of a rank where a byte costs 2^(exponent / 2) ns."""
        from pipecompile.recompute.choice import weighed

        found: dict[int, StageRecompute] = {}
        in_flight = self.view.in_flight
        for piece in held:
            problem = self.policies.problem(
                piece, summed=self.options.microbatches > in_flight[piece.stage]
            )
            choice = weighed(
                problem, self.policies.blocks(piece), in_flight[piece.stage], 2 ** (exponent / 2)
            )
            found[piece.stage] = self.policies.again(piece, choice.regions, choice.ns, 0)
        return found

    def of(self, piece: StageSlice, cap: int | None) -> StageRecompute | None:
        """What a stage computes again, or saves how, where its rank may hold `cap` bytes.

        None if `auto`, or forms, find nothing that does; a policy by hand is what it is.
        """
        if (piece, cap) not in self.known:
            self.known[piece, cap] = self._of(piece, cap)
        return self.known[piece, cap]

    def _of(self, piece: StageSlice, cap: int | None) -> StageRecompute | None:
        plain, policy = self.policies.plain(piece), self.options.recompute
        budget = None if cap is None else StageBudget(self.policies, piece, cap, self.settled)
        if policy != "auto":
            found: StageRecompute | None = self.policies.by_hand(piece, policy, plain)
        else:
            found = plain if budget is None or budget.fits(plain) else self._cheapest(budget, plain)
        if not self.options.saving or budget is None or budget.fits(plain):
            return found
        return budget.or_saved(found, plain)

    def _cheapest(self, budget: StageBudget, plain: StageRecompute) -> StageRecompute | None:
        """The whole stage, the whole for all microbatches but a step's last, or regions: what fits and takes least."""
        whole = self.policies.by_hand(
            budget.piece, "stage", plain
        )  # of the last stage `plain`, which does not fit
        whole = whole if self.view.may_split else whole._replace(least=0)  # regions may take less
        fitting = [whole] if budget.fits(whole) else []
        if not self.view.may_split and not (fitting and self.waiting):
            regions = budget.regions(plain)
            fitting = fitting if regions is None else [regions, *fitting]
        if fitting and self._may_spare:
            spared = self.policies.by_hand(budget.piece, "except-last", plain)._replace(least=0)
            fitting += [spared] if budget.fits(spared) else []
        return min(
            fitting, key=lambda again: again.mean_ns(self.options.microbatches), default=None
        )

    @property
    def _may_spare(self) -> bool:
        """Whether the last microbatch may be treated otherwise; proofs of cuts are of choices that treat all alike."""
        return self.settled and self.options.microbatches > 1 and self.options.schedule != "search"

    @cached_property
    def policies(self) -> RecomputePolicies:
        """What stages compute again by a policy, and what their ranks hold then."""
        return RecomputePolicies(self.graph, self.options, self.view)
