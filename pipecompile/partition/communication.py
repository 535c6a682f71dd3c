"""What the stages of a family pay to fit their memory: as they were priced, at the least, or as is guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from pipecompile.partition.boundaries import Boundaries, Rows
from pipecompile.partition.instance import Integers, Mask
from pipecompile.partition.problem import Memory, Problem

__all__ = ["Payments", "Stage"]

Stage = tuple[int, int, int]  # its number, and the rows where it begins and ends

NEVER = -1  # the price of a stage that cannot be
FLOORS_MAX = 1 << 23  # pairs whose least prices are remembered
GUESS = 4096  # guesses are off by less than this part of a cap
ROUNDING = 1e-9  # more than sums of floating point numbers are off


@dataclass
class Payments:
    """`priced` holds what stages were found to pay, ns per microbatch, or None for a stage that cannot be.

    One that was not priced yet pays the least that it may, with the bytes that `guesses` has for its stage held
    besides; if `closed`, it cannot be.
    """

    family: Boundaries
    priced: dict[Stage, int | None] = field(default_factory=dict)
    guesses: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    _prices: dict[int, Integers] = field(default_factory=dict)
    _needed: dict[Stage, int] = field(default_factory=dict)
    _known: dict[tuple[int, bytes, bytes], Integers] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """What is cut."""
        return self.family.instance.problem

    @property
    def memory(self) -> Memory:
        """What stages hold, of a problem that says so."""
        assert self.problem.memory is not None
        return self.problem.memory

    @property
    def certain(self) -> bool:
        """Whether no stage is taken to pay more than it may."""
        return not (self.guesses or self.closed)

    def over(self, a: Rows, b: Rows, stage: int) -> Integers:
        """By how much every pair is over its cap at the least, bytes."""
        return self._held(a, b, stage) - self._cap(stage)

    def _cap(self, stage: int) -> int:
        return self.memory.caps[self.problem.stage_ranks[stage]]

    def _held(self, a: Rows, b: Rows, stage: int) -> Integers:
        sums, memory = self.family.sums, self.memory
        each = sums.resident + memory.in_flight[stage] * sums.saved
        held: Integers = each[b][None, :] - each[a][:, None]
        if memory.floor is None:
            return held
        return held + sums.crossing["arriving"][a][:, None] + sums.crossing["returning"][b][None, :]

    def taken(self, stage: int, a: int, b: int) -> int:
        """What the stage between two rows of a chain is taken to pay, ns."""
        price = self.priced.get((stage, a, b))
        return self._floor_of(stage, a, b, self.guesses.get(stage, 0)) if price is None else price

    def guess(self) -> None:
        """Takes it that a stage needs as much memory besides as explains the lowest of the prices that it was given."""
        for stage in range(self.problem.k):
            for key in (key for key in self.priced if key[0] == stage and key not in self._needed):
                self._needed[key] = self._besides(key, self.priced[key])
            needed = (besides for key, besides in self._needed.items() if key[0] == stage)
            self.guesses[stage] = min(needed, default=0)

    def _besides(self, stage: Stage, price: int | None) -> int:
        """The least memory besides that makes a stage pay its price, or impossible."""
        cap = self._cap(stage[0])
        low, high = -1, cap
        while high - low > max(1, cap // GUESS):
            middle = (low + high) // 2
            floor = self._floor_of(*stage, middle)
            reached = floor == NEVER if price is None else floor >= price or floor == NEVER
            low, high = (low, middle) if reached else (middle, high)
        return max(0, high)

    def _floor_of(self, stage: int, a: int, b: int, besides: int) -> int:
        return int(
            self._floor(np.array([a], np.intp), np.array([b], np.intp), stage, besides)[0, 0]
        )

    @property
    def most(self) -> int:
        """No stage is taken to pay more, in ns."""
        if self.problem.memory is None:
            return 0
        held: list[int] = self.family.sums.freeable[:, -1].tolist()
        pairs = zip(held, self.memory.freeable, strict=True)
        return max((extra or 0 for extra in self.priced.values()), default=0) + ceil(
            sum((size * each.rate for size, each in pairs), Fraction(0))
        )

    def _floors(self, a: Rows, b: Rows, stage: int) -> Integers:
        """The least that every pair pays to fit its memory, ns, or as is guessed; NEVER where nothing helps."""
        besides = self.guesses.get(stage, 0)
        key = stage, a.tobytes(), b.tobytes()
        if besides or key not in self._known:
            found = self._floor(a, b, stage, besides)
            if (
                besides
                or len(a) * len(b) + sum(known.size for known in self._known.values()) > FLOORS_MAX
            ):
                return found
            self._known[key] = found
        return self._known[key]

    def _floor(self, a: Rows, b: Rows, stage: int, besides: int) -> Integers:
        """What is too much, freed from the cheapest class on: a fractional knapsack."""
        sums = self.family.sums.freeable
        flight, every = self.memory.in_flight[stage], sums.sum(axis=0)
        missing = (
            -(-(self.over(a, b, stage) + besides) // flight) + every[b][None, :] - every[a][:, None]
        )
        spent = np.zeros(missing.shape)
        for each, held in zip(self.memory.freeable, sums, strict=True):
            if not (missing > 0).any():
                break
            freed = np.clip(missing, 0, np.maximum(held[b][None, :] - held[a][:, None], 0))
            spent += freed * float(each.rate)
            missing -= freed
        return np.where(missing > 0, NEVER, np.floor(spent * (1 - ROUNDING)).astype(np.int64))

    def pay(self, stage: int, a: int, b: int, extra: int | None) -> None:
        """Notes what the stage between two rows was found to pay."""
        self.priced[stage, a, b] = extra
        known = self._prices.get(stage, np.zeros((0, 3), np.int64))
        self._prices[stage] = np.concatenate([known, [[a, b, NEVER if extra is None else extra]]])

    def add(self, a: Rows, b: Rows, stage: int, load: Integers, fits: Mask) -> None:
        """Adds what stages were found to pay, and what others pay at the least or as is guessed, in place."""
        if self.problem.memory is None or self.memory.price is None:
            return
        floor = self._floors(a, b, stage)
        allowed = fits.copy()
        fits &= (floor != NEVER) & (not self.closed)
        load += np.maximum(floor, 0)
        before, after, extra = self._prices.get(stage, np.zeros((0, 3), np.int64)).T
        i, j = np.searchsorted(a, before), np.searchsorted(b, after)
        here = (i < len(a)) & (j < len(b))
        here[here] = (a[i[here]] == before[here]) & (b[j[here]] == after[here])
        i, j, extra = i[here], j[here], extra[here]
        fits[i, j] = allowed[i, j] & (extra != NEVER)
        load[i, j] += np.maximum(extra, 0) - np.maximum(floor[i, j], 0)
