"""Local search over the boundaries of stages that share ranks.

No dynamic program is possible here, since no chain of stages knows the load of a rank. All stages
are intervals of one order of the units. A move shifts a run of boundaries, so that one stage gains
units, another one loses as many, and the stages between them keep their size:

    rank       0      1      2      0      1      2
    before     a b  | c d  | e    | f    | g h  | i j      rank 2 has 3, rank 0 has 3, rank 1 has 4
    after      a b  | c    | d    | e    | f g h| i j      stage 1 gives a unit to stage 4

Each step takes the best of all moves. Moves of boundaries alone, or with all after them, are among
them; a unit thus goes between any two ranks at once. While ranks hold more than their caps, the
best move is the one that leaves the least too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import Integers

__all__ = ["BoundaryShifts", "can_shift"]

Floats = NDArray[np.float64]
ROUNDING = 1e-12  # of squares, which are compared in floating point


def can_shift(problem: PartitionProblem) -> bool:
    """Return whether the search knows all that decides which cuts are allowed, and their loads."""
    return (
        problem.communication in ("relay", "none")
        and problem.speeds is None
        and problem.replica_ranks is None
        and not problem.pin
        and not problem.parameters_everywhere
    )


@dataclass(frozen=True)
class BoundaryShifts:
    """The search over the cuts of one order.

    A cut is the array of its `ends`, of k + 1 rows of `prefixes`: stage s holds the units from
    ends[s] on, up to ends[s + 1].
    """

    prefixes: Prefixes

    @property
    def _problem(self) -> PartitionProblem:
        return self.prefixes.unit_graph.problem

    @cached_property
    def _is_on(self) -> Integers:
        """(stages, ranks): 1 where the stage lies on the rank."""
        ranks = np.asarray(self._problem.stage_ranks)
        result: Integers = (ranks[:, None] == np.arange(self._problem.ranks)).astype(np.int64)
        return result

    @cached_property
    def _crossing(self) -> Integers:
        """(k + 1, rows): what each boundary pays on both of its sides, were it at each row."""
        free = np.zeros(len(self.prefixes), np.int64)
        if self._problem.communication == "none":
            return np.tile(free, (self._problem.k + 1, 1))
        hops = [self._problem.hop(stage) for stage in range(self._problem.k - 1)]
        return np.stack([free, *map(self.prefixes.crossing, hops), free])

    def best(self, stages: Sequence[int], steps: int) -> tuple[int, ...]:
        """Return the stages of the units after at most so many `steps`.

        `stages` are those to start from, which are intervals of the order.
        """
        ordered = np.asarray(stages)[self.prefixes.order]
        ends = np.searchsorted(ordered, np.arange(self._problem.k + 1))
        for _ in range(steps):
            better = self._step(ends)
            if better is None:
                break
            ends = better
        return tuple((np.searchsorted(ends, self.prefixes.place, side="right") - 1).tolist())

    def _step(self, ends: Rows) -> Rows | None:
        """Return the ends after the best move; None if no move is better."""
        on_ranks = self._amounts(ends[:-1], ends[1:]) @ self._is_on
        least, best = self._value(on_ranks[:, None])[0], None
        size = 1
        # Sizes 1, 2, 4 … up to the largest stage, which is all that a move could take away.
        while size < max(2, int(np.diff(ends).max())):
            for change in (size, -size):
                found = self._best_shift(ends, on_ranks, change)
                if found is not None and _is_less(found.value, least):
                    least, best = found.value, found.ends
            size *= 2
        return best

    def _best_shift(self, ends: Rows, on_ranks: Integers, change: int) -> _Shifted | None:
        """Return the best cut with a run of boundaries moved by `change`; None if there is none."""
        # Boundaries i + 1 … j move: stage i changes at its right end, stage j at its left one.
        i, j = np.triu_indices(self._problem.k, 1)
        size = np.diff(ends)
        is_allowed = (size[i] + change > 0) & (size[j] - change > 0)
        i, j = i[is_allowed], j[is_allowed]
        if not len(i):
            return None
        # What is outside of the order belongs to moves that are not allowed.
        moved = np.clip(ends + change, 0, len(self.prefixes) - 1)
        # With boundaries i + 1 … j moved, stages i + 1 … j − 1 move at both ends and keep
        # their size, but hold other units. Each of the three has the changes for all stages at
        # once, so that k²/2 moves cost three evaluations of all stages, and then only sums.
        first, between, last = (
            self._change(ends, left, right)
            for left, right in ((ends, moved), (moved, moved), (moved, ends))
        )
        # until[n] is the sum over the stages before n, so
        # stages i + 1 … j − 1 are a difference of two.
        until = np.concatenate([np.zeros_like(between[:, :1]), between.cumsum(axis=1)], axis=1)
        between = until[:, j] - until[:, i + 1]
        values = self._value(on_ranks[:, None] + first[:, i] + between + last[:, j])
        row = np.lexsort(values.T[::-1])[0]
        shifted = ends.copy()
        shifted[i[row] + 1 : j[row] + 1] += change
        return _Shifted(values[row], shifted)

    def _change(self, ends: Rows, left: Rows, right: Rows) -> Integers:
        """Return (amounts, stages, ranks): what ranks gain if a stage has the ends of `left` and
        `right`.
        """
        after, before = self._amounts(left[:-1], right[1:]), self._amounts(ends[:-1], ends[1:])
        result: Integers = (after - before)[:, :, None] * self._is_on
        return result

    def _amounts(self, left: Rows, right: Rows) -> Integers:
        """Return (amounts, stages) between rows: the load, and the bytes that are held."""
        loads, memory = self._loads(left, right), self._problem.memory
        if memory is None:
            return loads[None]
        resident, saved = self.prefixes.sums.resident, self.prefixes.sums.saved
        in_flight = np.asarray(memory.in_flight)
        held = resident[right] - resident[left] + in_flight * (saved[right] - saved[left])
        return np.stack([loads, held])

    def _loads(self, left: Rows, right: Rows) -> Integers:
        """Return the load of each stage between its rows."""
        compute, last = self.prefixes.sums.compute
        loads = compute[right] - compute[left]
        loads[-1] = last[right[-1]] - last[left[-1]]
        stages = np.arange(self._problem.k)
        result: Integers = loads + self._crossing[stages, left] + self._crossing[stages + 1, right]
        return result

    def _value(self, on_ranks: Integers) -> Floats:
        """Return (cuts, 3) of the amounts on ranks (amounts, cuts, ranks): the bytes over the caps,
        the objective of the loads, then the other objective.
        """
        loads = on_ranks[0].astype(np.float64)
        most, squares = loads.max(axis=1), (loads * loads).sum(axis=1)
        by_squares = self._problem.objective == "variance"
        excess = np.zeros_like(most)
        if self._problem.memory is not None:
            over = on_ranks[1] - np.asarray(self._problem.memory.caps)
            excess = np.maximum(over, 0).sum(axis=1).astype(np.float64)
        return np.stack([excess, *([squares, most] if by_squares else [most, squares])], axis=1)


class _Shifted(NamedTuple):
    """A cut with moved boundaries, and what it is worth."""

    value: Floats
    ends: Rows


def _is_less(value: Floats, other: Floats) -> bool:
    if value[0] != other[0]:
        return bool(value[0] < other[0])
    # By more than rounding, or else moves could go back and forth.
    if abs(value[1] - other[1]) > ROUNDING * other[1]:
        return bool(value[1] < other[1])
    return bool(value[2] < other[2] * (1 - ROUNDING))
