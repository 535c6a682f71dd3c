"""One stage under a memory cap: the regions and encodings of least extra time that fit its rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipecompile.memory_model.recompute_problem import RecomputeProblem
from pipecompile.recompute.policies import (
    RecomputePolicies,
    StageRecompute,
    StageSlice,
    encoding_ns,
)
from pipecompile.recompute.region import Region

if TYPE_CHECKING:
    from pipecompile.recompute.choice import RegionChoice
    from pipecompile.recompute.encoding_offers import EncodingOffer

__all__ = ["CappedStage"]

REFINING_SECONDS = 1.0  # of deterministic work on the regions of one stage
TRIES = 12  # each allows less memory, where the rank's peak is above that of the problem


class _Room(NamedTuple):
    """What regions must fit into: `in_flight` microbatches within `available` bytes.

    `most_kept` limits what each microbatch keeps, where other moments of the rank leave less.
    """

    problem: RecomputeProblem
    blocks: Sequence[str]
    in_flight: int
    available: int
    most_kept: int | None = None

    def reduced(self, excess: int, kept: int) -> _Room:
        """Return the room with `excess` bytes less, where a microbatch kept `kept` bytes.

        The excess is taken from the peak, and divided among the microbatches in flight.
        """
        # 30 bytes too many with 3 in flight that kept 50 each: at most 40 may be kept from now on.
        less_each = -(-excess // self.in_flight)
        return self._replace(available=self.available - excess, most_kept=kept - less_each)


@dataclass(frozen=True)
class CappedStage:
    """A cap of `bytes` for a rank whose only stage is `stage_slice`.

    When the cut is `settled`, regions are worth a longer search than while cuts are compared.
    """

    policies: RecomputePolicies
    stage_slice: StageSlice
    bytes: int
    settled: bool

    def excess(self, recompute: StageRecompute) -> int:
        """Return the bytes by which the rank is over its cap; at most 0 if it fits."""
        return self.policies.peak_bytes({self.stage_slice.stage: recompute}) - self.bytes

    def fits(self, recompute: StageRecompute) -> bool:
        """Return whether the rank is within its cap."""
        return self.excess(recompute) <= 0

    def regions(self, plain: StageRecompute) -> StageRecompute | None:
        """Return the cheapest regions that fit, None if none are found.

        `plain` is the stage without regions; its saved tensors may be encoded. Regions are chosen
        by the peak of the backward with most microbatches in flight. The peak of the whole order
        may be higher: then they are chosen again with that much less memory.
        """
        from pipecompile.recompute.choice import cheapest, is_exact
        from pipecompile.recompute.lower_bound import least_ns
        from pipecompile.recompute.nested_regions import nested_regions

        room = self._room(plain)
        if room is None:
            return None
        least = least_ns(room.problem, room.in_flight, room.available)
        if least is None:
            return None
        for attempt in range(TRIES):
            choice = cheapest(*room)
            # With one microbatch in flight regions within regions may be cheaper, and not all of
            # these are looked at; so only with more is the first choice proven to be the best.
            is_proven = attempt == 0 and is_exact(room.problem) and room.in_flight > 1
            if choice is None and room.in_flight == 1:
                choice = nested_regions(room.problem, room.blocks, room.available)
            if choice is None:
                return None
            recompute = self._recompute(choice, choice.ns if is_proven else least, plain)
            excess = self.excess(recompute)
            if excess <= 0:
                return self._refined(room, recompute) if self.settled else recompute
            room = room.reduced(excess, choice.kept)
        return None

    def _recompute(self, choice: RegionChoice, least: int, plain: StageRecompute) -> StageRecompute:
        policies = self.policies
        return policies.with_regions(
            self.stage_slice, choice.regions, choice.ns, least, plain.encoded_runs
        )

    def _room(self, plain: StageRecompute) -> _Room | None:
        """Return the room at the backward with most in flight; None if there is no backward."""
        allowances = self.policies.backward_allowances(self.stage_slice, plain, self.bytes)
        if not allowances:
            return None
        tight = max(allowances, key=lambda each: (each.in_flight, each.has_gradients, -each.bytes))
        problem = self.policies.problem(
            self.stage_slice,
            has_gradients=bool(tight.has_gradients),
            encoded_runs=plain.encoded_runs,
        )
        return _Room(problem, self.policies.blocks(self.stage_slice), tight.in_flight, tight.bytes)

    def _refined(self, room: _Room, recompute: StageRecompute) -> StageRecompute:
        """Return a cheaper choice, or `recompute` with a better bound.

        Nested regions are tried with one microbatch in flight, else the integer program; its bound
        holds for regions that lie side by side.
        """
        from pipecompile.recompute.nested_regions import nested_regions

        if recompute.ns == recompute.least:
            return recompute
        encoding = encoding_ns(recompute.encoded_runs)
        least = recompute.least - encoding
        if room.in_flight == 1:
            choice = nested_regions(room.problem, room.blocks, room.available)
        else:
            choice, bound = self._by_program(room, recompute)
            least = max(least, bound)
        if choice is not None and choice.ns + encoding < recompute.ns:
            other = self._recompute(choice, least, recompute)
            if self.fits(other):
                return other
        return recompute._replace(least=min(least + encoding, recompute.ns))

    def _by_program(self, room: _Room, recompute: StageRecompute) -> tuple[RegionChoice, int]:
        from pipecompile.recompute.choice import priced
        from pipecompile.recompute.integer_program import refined

        position = {name: index for index, name in enumerate(self.stage_slice.nodes)}
        known = [Region(position[names[0]], position[names[-1]] + 1) for names in recompute.regions]
        regions, bound = refined(
            room.problem, room.in_flight, room.available, known, REFINING_SECONDS
        )
        assert regions is not None, "the known regions fit"
        return priced(room.problem, regions), bound

    def or_encoded(
        self, recompute: StageRecompute | None, plain: StageRecompute
    ) -> StageRecompute | None:
        """Return what fits at the least extra time: `recompute`, encodings, or both; None if none.

        Half precision is not exact, so it is only tried where nothing else fits. No bound is
        claimed: that no mixture takes less is not proven.
        """
        from pipecompile.recompute.encoding_offers import encoding_offers

        options = self.policies.options
        exact = tuple(encoding for encoding in options.encodings if encoding != "half")
        for encodings in dict.fromkeys((exact, options.encodings)):
            offers = encoding_offers(
                self.policies.ranges, self.stage_slice.before, self.stage_slice.nodes, encodings
            )
            candidates = [recompute, *self._encoded(offers, plain, recompute)]
            fitting = [each for each in candidates if each is not None and self.fits(each)]
            if fitting:
                cheapest = min(fitting, key=lambda each: each.mean_ns(options.microbatches))
                return cheapest._replace(least=0)
        return None

    def _encoded(
        self,
        offers: Sequence[EncodingOffer],
        plain: StageRecompute,
        recompute: StageRecompute | None,
    ) -> Iterator[StageRecompute | None]:
        """Yield two candidates: as many encodings as it takes, and the cheap ones with regions."""
        runs = tuple(offer.encoded for offer in offers)

        def encoded(count: int) -> StageRecompute:
            return self.policies.with_regions(self.stage_slice, (), 0, 0, runs[:count])

        # Offers come from the cheapest on, and more of them never need more memory.
        # If even all of them do not fit, all are yielded, and the caller finds that they do not.
        counts = range(len(runs))
        yield encoded(bisect_left(counts, True, key=lambda count: self.fits(encoded(count))))
        # Beside regions only those encodings are worth it that free a byte in less time than these.
        count = len(runs)
        if recompute is not None:
            # Regions that free 100 bytes in 50 ns leave room for offers below 0.5 ns a byte.
            freed = plain.kept_bytes - recompute.kept_bytes
            ns = recompute.mean_ns(self.policies.options.microbatches)
            count = sum(offer.ns_per_byte * freed < ns for offer in offers)
        if self.policies.options.recompute == "auto" and count:
            yield self.regions(encoded(count))
