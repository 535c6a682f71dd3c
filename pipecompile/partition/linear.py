"""The best cut of one topological order, by dynamic programming over intervals.

A stage is an interval of the order. Its load is its compute plus the transfers over its two ends, and a prefix cut
into s stages is best continued from the best cut of a shorter prefix into s − 1 (the recurrence of PipeDream's
partitioner, arXiv 1806.03377, with both ends charged). O(k · units²) on whole arrays, in exact integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import InfeasibleError
from pipecompile.ir.memory import Layout
from pipecompile.partition.contraction import contract
from pipecompile.partition.problem import Problem
from pipecompile.partition.result import Partition

__all__ = ["UNITS_MAX", "solve"]

UNITS_MAX = 2000  # beyond, units are contracted first: the tables take 8 · units² bytes each
Integers = NDArray[Any]  # int64, or Python integers where squares do not fit
Mask = NDArray[np.bool_]


def solve(problem: Problem) -> Partition:
    """The cut of the order of `problem.units` that is best for its objective; ties go to the other objective.

    It is proven best of all cuts where it meets the bound, or where the graph has no other order.
    InfeasibleError says by how much a cap is missed and at which node.
    """
    order = _Order.of(problem)
    cuts = _best_cuts(order)
    if cuts is None:
        raise InfeasibleError(_why_infeasible(order))
    ends = [*cuts, len(order.layout.units)]
    stages = [order.layout.units[start:stop] for start, stop in pairwise([0, *ends])]
    assignment = {name: stage for stage, group in enumerate(stages) for unit in group for name in unit}
    return Partition.of(problem, assignment, cuts, method="linear-dp", best=order.is_only_one)


@dataclass(frozen=True)
class _Order:
    """A problem laid out in one order, with a table for each position that a stage can take."""

    problem: Problem
    layout: Layout
    pins: dict[tuple[str, ...], int]

    @staticmethod
    def of(problem: Problem) -> _Order:
        units, pins = problem.units, problem.pins
        if len(units) > UNITS_MAX:
            weights = [problem.compute_ns(unit, last=False) for unit in units]
            units, pins = contract(units, weights, max(UNITS_MAX, problem.k), pins)
        return _Order(problem, Layout(problem.graph, units), pins)

    @cached_property
    def is_only_one(self) -> bool:
        """Whether each unit feeds the next, and none were contracted: every cut is then an interval cut of this."""
        position = self.layout.position
        edges = {(position[t.producer], position[name]) for t in self.problem.graph.tensors for name in t.consumers}
        count = len(self.layout.units)
        return count == len(self.problem.units) and all((i, i + 1) in edges for i in range(count - 1))

    @cached_property
    def crossing(self) -> list[int]:
        """Per position the time of all transfers, values and gradients, if the order is cut there."""
        change = [0] * (len(self.layout.units) + 1)
        if self.problem.communication == "relay":
            transfer_ns = self.problem.link.transfer_ns
            for first, last, value, gradient in self.layout.spans:
                change[first + 1] += transfer_ns(value) + transfer_ns(gradient)
                change[last + 1] -= transfer_ns(value) + transfer_ns(gradient)
        return list(accumulate(change))

    def prefix(self, stage: int) -> list[int]:
        """Running sums of the units' compute as part of `stage`."""
        last = stage == self.problem.k - 1
        return list(accumulate((self.problem.compute_ns(unit, last=last) for unit in self.layout.units), initial=0))

    @cached_property
    def ceiling(self) -> int:
        """More than any cut's Σ load², and what stands for an impossible one."""
        return (self.prefix(0)[-1] + 2 * (self.problem.k - 1) * max(self.crossing)) ** 2 + 1

    @property
    def kind(self) -> type:
        """How integers are held: in 64 bits where every sum provably fits."""
        return np.int64 if self.ceiling <= 2**62 else object

    def load(self, stage: int) -> Integers:
        """The load of every interval as `stage`: table[start, stop]."""
        compute: Integers = np.array(self.prefix(stage), self.kind)
        crossing: Integers = np.array(self.crossing, self.kind)
        table: Integers = (compute + crossing)[None, :] - (compute - crossing)[:, None]
        return table

    def fits(self, stage: int) -> Mask:
        """Whether an interval may be `stage`, its memory aside: not empty, with its pins and no others."""
        count = len(self.layout.units)
        allowed = np.triu(np.ones((count + 1, count + 1), np.bool_), 1)
        for unit, wanted in self.pins.items():
            position = self.layout.position[unit[0]]
            if wanted == stage:
                allowed[position + 1 :, :] = False
                allowed[:, : position + 1] = False
            else:
                allowed[: position + 1, position + 1 :] = False
        return allowed

    def allowed(self, stage: int) -> Mask:
        """Whether an interval may be `stage`, its memory included."""
        if self.problem.memory_bytes is None or self.problem.stage_bytes is None:
            return self.fits(stage)
        return self.fits(stage) & (self.problem.stage_bytes(self.layout, stage) <= self.problem.memory_bytes)


def _best_cuts(order: _Order) -> tuple[int, ...] | None:
    if order.problem.objective == "variance":
        return _smallest_squares(order, None)
    most = _smallest_maximum(order.problem.k, order.load, order.allowed)
    return None if most is None else _smallest_squares(order, most[0])


def _smallest_squares(order: _Order, most: int | None) -> tuple[int, ...] | None:
    """The cut of least Σ load², then least maximum, of those with no load above `most`."""
    never, count = order.ceiling, len(order.layout.units)
    squares, worst = _start(never, count, order.kind), _start(0, count, order.kind)
    choices = []
    for stage in range(order.problem.k):
        load, allowed = order.load(stage), order.allowed(stage)
        if most is not None:
            allowed &= load <= most
        total = squares[:, None] + load * load
        total[~(allowed & (squares < never)[:, None])] = never
        squares = total.min(axis=0)
        peak = np.maximum(worst[:, None], load)
        peak[total != squares] = never
        choices.append(peak.argmin(axis=0))
        worst = peak[choices[-1], np.arange(count + 1)]
    return _walk_back(choices) if squares[-1] < never else None


def _smallest_maximum(
    k: int, weight: Callable[[int], Integers], allowed: Callable[[int], Mask]
) -> tuple[int, tuple[int, ...]] | None:
    """The least possible maximum of a weight over the stages, and a cut that has it."""
    never = 1 + max(int(weight(stage).max()) for stage in range(k))
    best = _start(never, len(weight(0)) - 1, weight(0).dtype.type)
    choices = []
    for stage in range(k):
        peak = np.maximum(best[:, None], weight(stage))
        peak[~allowed(stage)] = never
        choices.append(peak.argmin(axis=0))
        best = peak.min(axis=0)
    return (int(best[-1]), _walk_back(choices)) if best[-1] < never else None


def _start(never: int, count: int, kind: type) -> Integers:
    """Before the first stage only the empty prefix is there."""
    best: Integers = np.full(count + 1, never, kind)
    best[0] = 0
    return best


def _walk_back(choices: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    cuts = [len(choices[0]) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(cuts[-2:0:-1])


def _why_infeasible(order: _Order) -> str:
    """One line: the pins, or how much memory is short and which node is in the way."""
    problem, pricing, cap = order.problem, order.problem.stage_bytes, order.problem.memory_bytes
    least = None
    if pricing is not None:
        least = _smallest_maximum(problem.k, lambda stage: pricing(order.layout, stage), order.fits)
    if least is None or pricing is None or cap is None:
        pins = ", ".join(f"{name}={stage}" for name, stage in problem.pin.items())
        return f"no cut into k={problem.k} non-empty stages meets the pins {pins}; drop one or choose another k"
    needed, cuts = least
    tables = [pricing(order.layout, stage) for stage in range(problem.k)]
    ends = list(pairwise([0, *cuts, len(order.layout.units)]))
    stage = max(range(problem.k), key=lambda s: tables[s][ends[s]])
    heaviest = max(range(*ends[stage]), key=lambda unit: tables[stage][unit, unit + 1])
    alone = int(tables[stage][heaviest, heaviest + 1])
    return (
        f"a rank may hold {cap:,} bytes, but the best cut into k={problem.k} stages needs {needed:,}, "
        f"{needed - cap:,} more, in stage {stage}, where {order.layout.units[heaviest][0]} is the largest node "
        f"({alone:,} alone); allow more memory, more stages, fewer microbatches or recompute"
    )
