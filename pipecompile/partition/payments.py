"""What the stages of a family pay to fit their memory: a known price, a lower bound, or a guess.

`chains` adds payments to the loads of stages, and `priced_search` asks for the prices of those that
the best chain has. A price may need the whole memory model, and a family has millions of stages; so
stages without a price are charged a lower bound: a fractional knapsack. For a stage that holds 100
bytes over its cap with everything kept:

    freeable class   bytes in the stage   ns per byte   freed   ns
    cheapest                 60               0           60     0
    next                     90               2           40    80
    dearest                  50               7            0     0
                                                         ───   ───
                                                         100    80    the stage pays at least 80 ns

If the bytes of all classes do not suffice, the stage cannot fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from pipecompile.partition.boundaries import Boundaries, Rows
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import Integers, Mask

__all__ = ["Payments", "StageKey"]

StageKey = tuple[int, int, int]  # the number of a stage, and the rows at which it begins and ends

IMPOSSIBLE = -1  # the price of a stage that cannot fit
CACHED_PAIRS_MAX = 1 << 23  # pairs whose lower bounds are remembered
GUESS_PARTS = 4096  # guesses are exact to this part of a cap
ROUNDING = 1e-9  # above the error of sums of floating-point numbers


@dataclass
class Payments:
    """The payments of stages, in ns per microbatch.

    `priced` has the stages whose price is known; None stands for a stage that cannot fit. Any other
    stage pays a lower bound: the least that frees its excess and, besides, the bytes that
    `guessed_bytes` has for its number. If `only_priced`, any other stage is excluded.
    """

    family: Boundaries
    priced: dict[StageKey, int | None] = field(default_factory=dict)
    guessed_bytes: dict[int, int] = field(default_factory=dict)
    only_priced: bool = False
    # The same prices by stage, as rows (a, b, ns), for whole arrays of stages.
    _price_rows: dict[int, Integers] = field(default_factory=dict)
    _explaining_bytes: dict[StageKey, int] = field(default_factory=dict)
    _least_ns_cache: dict[tuple[int, bytes, bytes], Integers] = field(default_factory=dict)

    @property
    def problem(self) -> PartitionProblem:
        """The problem that the family's chains are cuts of."""
        return self.family.unit_graph.problem

    @property
    def memory(self) -> MemoryConstraint:
        """The memory constraint of a problem that has one."""
        assert self.problem.memory is not None
        return self.problem.memory

    @property
    def is_certain(self) -> bool:
        """Whether no stage is charged more than it may have to pay: there are no guesses."""
        return not (self.guessed_bytes or self.only_priced)

    def least_excess(self, a: Rows, b: Rows, stage: int) -> Integers:
        """Return (len(a), len(b)): a lower bound of the bytes that each stage holds over its cap.

        It is negative for stages below their cap.
        """
        return self._least_held(a, b, stage) - self._cap(stage)

    def _cap(self, stage: int) -> int:
        return self.memory.caps[self.problem.stage_ranks[stage]]

    def _least_held(self, a: Rows, b: Rows, stage: int) -> Integers:
        sums, memory = self.family.sums, self.memory
        per_ideal = sums.resident + memory.in_flight[stage] * sums.saved
        held: Integers = per_ideal[b][None, :] - per_ideal[a][:, None]
        if memory.boundary_buffers is None:
            return held
        values, gradients = memory.boundary_buffers.counts[stage]
        held += values * sums.crossing["arriving"][a][:, None]
        held += gradients * sums.crossing["returning"][b][None, :]
        return held

    # Lower bounds

    def charged_ns(self, stage: int, a: int, b: int) -> int:
        """Return the charge of the stage between two rows: its price or its lower bound."""
        price = self.priced.get((stage, a, b))
        if price is not None:
            return price
        return self._least_ns_of((stage, a, b), self.guessed_bytes.get(stage, 0))

    @property
    def most_ns(self) -> int:
        """An upper bound of what any stage is charged: the largest price, and all classes freed."""
        if self.problem.memory is None:
            return 0
        sizes: list[int] = self.family.sums.freeable[:, -1].tolist()
        classes = zip(sizes, self.memory.freeable, strict=True)
        freed_ns = sum((size * freeable.rate for size, freeable in classes), Fraction(0))
        return max((price or 0 for price in self.priced.values()), default=0) + ceil(freed_ns)

    def _least_ns(self, a: Rows, b: Rows, stage: int) -> Integers:
        """Return `_knapsack_ns` with the guess of the stage, from the cache where possible."""
        guess = self.guessed_bytes.get(stage, 0)
        if guess:  # guesses change, so their results are not worth caching
            return self._knapsack_ns(a, b, stage, guess)
        key = stage, a.tobytes(), b.tobytes()
        if key not in self._least_ns_cache:
            least_ns = self._knapsack_ns(a, b, stage, 0)
            cached_pairs = sum(cached.size for cached in self._least_ns_cache.values())
            if len(a) * len(b) + cached_pairs > CACHED_PAIRS_MAX:
                return least_ns
            self._least_ns_cache[key] = least_ns
        return self._least_ns_cache[key]

    def _least_ns_of(self, key: StageKey, more_bytes: int) -> int:
        stage, a, b = key
        rows = np.array([a], np.intp), np.array([b], np.intp)
        return int(self._knapsack_ns(*rows, stage, more_bytes)[0, 0])

    def _knapsack_ns(self, a: Rows, b: Rows, stage: int, more_bytes: int) -> Integers:
        """Return (len(a), len(b)): the least time that frees the excess and `more_bytes`.

        It is IMPOSSIBLE where nothing frees them.

        Bytes are freed once per microbatch in flight, from the cheapest class on.
        """
        sums = self.family.sums.freeable
        in_flight, all_classes = self.memory.in_flight[stage], sums.sum(axis=0)
        # `least_excess` takes freeable bytes as freed; here they are kept at first.
        kept = all_classes[b][None, :] - all_classes[a][:, None]
        missing = -(-(self.least_excess(a, b, stage) + more_bytes) // in_flight) + kept
        spent = np.zeros(missing.shape)
        for freeable, class_sums in zip(self.memory.freeable, sums, strict=True):
            if not (missing > 0).any():
                break
            available = np.maximum(class_sums[b][None, :] - class_sums[a][:, None], 0)
            freed = np.clip(missing, 0, available)
            spent += freed * float(freeable.rate)
            missing -= freed
        spent_ns = np.floor(spent * (1 - ROUNDING)).astype(np.int64)
        return np.where(missing > 0, IMPOSSIBLE, spent_ns)

    # Guesses

    def guess(self) -> None:
        """Guess, for each stage number, how many bytes its stages hold above their lower bound.

        For each price the bytes are found that explain it; the least of them is the guess.
        """
        for stage in range(self.problem.k):
            for key in self.priced:
                if key[0] == stage and key not in self._explaining_bytes:
                    self._explaining_bytes[key] = self._bytes_that_explain(key, self.priced[key])
            explaining = (size for key, size in self._explaining_bytes.items() if key[0] == stage)
            self.guessed_bytes[stage] = min(explaining, default=0)

    def _bytes_that_explain(self, key: StageKey, price: int | None) -> int:
        """Return the least additional bytes with which a stage pays its price, by bisection.

        For the price None, the bytes with which it cannot fit.
        """
        cap = self._cap(key[0])
        low, high = -1, cap
        while high - low > max(1, cap // GUESS_PARTS):
            middle = (low + high) // 2
            least_ns = self._least_ns_of(key, middle)
            explains = least_ns == IMPOSSIBLE or (price is not None and least_ns >= price)
            low, high = (low, middle) if explains else (middle, high)
        return max(0, high)

    # Prices

    def pay(self, stage: int, a: int, b: int, price: int | None) -> None:
        """Note the price of the stage between two rows; None if it cannot fit."""
        self.priced[stage, a, b] = price
        rows = self._price_rows.get(stage, np.zeros((0, 3), np.int64))
        row = [[a, b, IMPOSSIBLE if price is None else price]]
        self._price_rows[stage] = np.concatenate([rows, row])

    def add(self, a: Rows, b: Rows, stage: int, load: Integers, fits: Mask) -> None:
        """Add the charges of stages to `load`, and exclude from `fits` what is impossible.

        Both are (len(a), len(b)) and change in place.
        """
        if self.problem.memory is None or self.memory.price is None:
            return
        least_ns = self._least_ns(a, b, stage)
        allowed = fits.copy()
        fits &= (least_ns != IMPOSSIBLE) & (not self.only_priced)
        load += np.maximum(least_ns, 0)
        # Known prices replace the lower bounds, where their rows are among a and b.
        begins, ends, prices = self._price_rows.get(stage, np.zeros((0, 3), np.int64)).T
        i, j = np.searchsorted(a, begins), np.searchsorted(b, ends)
        here = (i < len(a)) & (j < len(b))
        here[here] = (a[i[here]] == begins[here]) & (b[j[here]] == ends[here])
        i, j, prices = i[here], j[here], prices[here]
        fits[i, j] = allowed[i, j] & (prices != IMPOSSIBLE)
        load[i, j] += np.maximum(prices, 0) - np.maximum(least_ns[i, j], 0)
