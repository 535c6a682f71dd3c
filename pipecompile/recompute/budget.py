"""One stage under a budget: regions, and forms of what is saved, that fit its rank at the least extra time.

Needs no PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipecompile.memory_model.recompute_problem import RecomputeProblem
from pipecompile.recompute.policies import RecomputePolicies, StageRecompute, StageSlice, ns_of
from pipecompile.recompute.region import Region

if TYPE_CHECKING:
    from pipecompile.recompute.choice import RegionChoice
    from pipecompile.recompute.encoding_offers import EncodingOffer

__all__ = ["StageBudget"]

REFINING_SECONDS = 1.0  # of work on the regions of one stage
TRIES = 12  # as less memory is allowed, where the peak of regions is not that of the order


class _Fit(NamedTuple):
    """What regions are chosen for: a stage and its blocks, the microbatches in flight, and the bytes they may take.

    Other moments may leave less for what each keeps: `most_kept`, if they do.
    """

    problem: RecomputeProblem
    blocks: Sequence[str]
    in_flight: int
    available: int
    most_kept: int | None = None

    def less(self, over: int, kept: int) -> _Fit:
        """For so many bytes less, where a microbatch kept so many: at the peak, and of each that is in flight."""
        return self._replace(
            available=self.available - over, most_kept=kept - -(-over // self.in_flight)
        )


@dataclass(frozen=True)
class StageBudget:
    """So many `bytes` for the rank of a stage that it does not share; regions are searched for longer if `settled`."""

    policies: RecomputePolicies
    piece: StageSlice
    bytes: int
    settled: bool

    def over(self, again: StageRecompute) -> int:
        """How many bytes the rank has too many; at most 0 if it fits."""
        return self.policies.total({self.piece.stage: again}) - self.bytes

    def fits(self, again: StageRecompute) -> bool:
        """Whether the rank fits."""
        return self.over(again) <= 0

    def regions(self, plain: StageRecompute) -> StageRecompute | None:
        """The cheapest by the tape's peak; as long as that of the order is too high, with less memory.

        `plain` is the stage without any, as it may already save in other forms.
        """
        from pipecompile.recompute.choice import cheapest, is_exact
        from pipecompile.recompute.lower_bound import least_ns
        from pipecompile.recompute.nested_regions import nested_regions

        fit = self._fit(plain)
        least = None if fit is None else least_ns(fit.problem, fit.in_flight, fit.available)
        if fit is None or least is None:
            return None
        for attempt in range(TRIES):
            # With one in flight regions within regions may take less, and of these not all are looked at.
            choice, exact = (
                cheapest(*fit),
                attempt == 0 and is_exact(fit.problem) and fit.in_flight > 1,
            )
            if choice is None and fit.in_flight == 1:
                choice = nested_regions(fit.problem, fit.blocks, fit.available)
            if choice is None:
                return None
            found = self._chosen(choice, choice.ns if exact else least, plain)
            over = self.over(found)
            if over <= 0:
                return self._refined(fit, found) if self.settled else found
            fit = fit.less(over, choice.kept)
        return None

    def _chosen(self, choice: RegionChoice, least: int, plain: StageRecompute) -> StageRecompute:
        return self.policies.again(self.piece, choice.regions, choice.ns, least, plain.saving)

    def _fit(self, plain: StageRecompute) -> _Fit | None:
        """By the backward that begins with the most microbatches in flight; None if there is none to keep them for."""
        limits = self.policies.spare(self.piece, plain, self.bytes)
        if not limits:
            return None
        tight = max(limits, key=lambda limit: (limit.in_flight, limit.summed, -limit.bytes))
        problem = self.policies.problem(self.piece, summed=bool(tight.summed), saving=plain.saving)
        return _Fit(problem, self.policies.blocks(self.piece), tight.in_flight, tight.bytes)

    def _refined(self, fit: _Fit, found: StageRecompute) -> StageRecompute:
        """By integer programming, which also finds a better bound, or with regions within others; or `found` as it is.

        That bound is for regions that lie side by side.
        """
        from pipecompile.recompute.nested_regions import nested_regions

        if found.ns == found.least:
            return found
        saving_ns = ns_of(found.saving)
        least = found.least - saving_ns
        if fit.in_flight == 1:
            choice = nested_regions(fit.problem, fit.blocks, fit.available)
        else:
            choice, bound = self._by_program(fit, found)
            least = max(least, bound)
        if choice is not None and choice.ns + saving_ns < found.ns:
            other = self._chosen(choice, least, found)
            if self.fits(other):
                return other
        return found._replace(least=min(least + saving_ns, found.ns))

    def _by_program(self, fit: _Fit, found: StageRecompute) -> tuple[RegionChoice, int]:
        from pipecompile.recompute.choice import priced
        from pipecompile.recompute.integer_program import refined

        place = {name: position for position, name in enumerate(self.piece.nodes)}
        known = [Region(place[region[0]], place[region[-1]] + 1) for region in found.regions]
        regions, bound = refined(fit.problem, fit.in_flight, fit.available, known, REFINING_SECONDS)
        assert regions is not None, "those that are known fit"
        return priced(fit.problem, regions), bound

    def or_saved(
        self, recomputed: StageRecompute | None, plain: StageRecompute
    ) -> StageRecompute | None:
        """What takes least: that, or other forms; None if nothing fits. That no mixture takes less is not proven."""
        from pipecompile.recompute.encoding_offers import encoding_offers

        options = self.policies.options
        exact = tuple(policy for policy in options.saving if policy != "half")
        for forms in dict.fromkeys((exact, options.saving)):
            offered = encoding_offers(
                self.policies.lives, self.piece.before, self.piece.nodes, forms
            )
            known = [recomputed, *self._saved(offered, plain, recomputed)]
            fitting = [again for again in known if again is not None and self.fits(again)]
            if fitting:  # what is not exact is for stages that nothing else lets fit
                return min(fitting, key=lambda again: again.mean_ns(options.microbatches))._replace(
                    least=0
                )
        return None

    def _saved(
        self,
        encoding_offers: Sequence[EncodingOffer],
        plain: StageRecompute,
        recomputed: StageRecompute | None,
    ) -> Iterator[StageRecompute | None]:
        """Other forms: as many as it takes, from the cheapest on, and those cheaper than regions, with these."""
        runs = tuple(offer.saving for offer in encoding_offers)

        def in_forms(count: int) -> StageRecompute:
            return self.policies.again(self.piece, (), 0, 0, runs[:count])

        yield in_forms(
            bisect_left(range(len(runs)), True, key=lambda count: self.fits(in_forms(count)))
        )
        count = len(runs)
        if recomputed is not None:
            freed, ns = (
                plain.kept_bytes - recomputed.kept_bytes,
                recomputed.mean_ns(self.policies.options.microbatches),
            )
            count = sum(offer.ns_per_byte * freed < ns for offer in encoding_offers)
        if self.policies.options.recompute == "auto" and count:
            yield self.regions(in_forms(count))
