"""The best chain of boundaries of a family, by dynamic programming over stages.

A family's ideals up to boundary s are best continued from the best chains that end in smaller ideals at boundary
s − 1 (PipeDream, arXiv 1806.03377, section 3.1, for intervals; Tarnawski et al., NeurIPS 2020, for ideals). What
is known of the best value keeps few ideals live: the compute below a boundary and above it must fit the stages
there. Exact, in whole arrays of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipecompile.partition.boundaries import Boundaries, Rows
from pipecompile.partition.communication import Payments
from pipecompile.partition.instance import Integers, Mask
from pipecompile.partition.problem import Problem
from pipecompile.partition.windows import Limit

__all__ = ["Chain", "Chains"]

BLOCK = 1 << 21  # pairs of ideals that are looked at together


@dataclass(frozen=True)
class Chain:
    """Rows of boundaries 0 … k of a family, the ranks of each stage, and the largest load."""

    rows: tuple[int, ...]
    replicas: tuple[int, ...]
    most: int


@dataclass
class Chains:
    """Chains of a family. `near` restricts boundary s to some rows; `payments` says what stages pay for their memory.

    With `rough`, `endpoint` is taken for `relay`, which is faster and never charges less.
    """

    family: Boundaries
    near: dict[int, Rows] = field(default_factory=dict)
    rough: bool = False

    @cached_property
    def payments(self) -> Payments:
        """What stages pay, as far as it is known."""
        return Payments(self.family)

    @property
    def problem(self) -> Problem:
        """What is cut."""
        return self.family.instance.problem

    @cached_property
    def ranks(self) -> int:
        """How many ranks all stages have together."""
        return self.problem.replica_ranks or self.problem.k

    def best(self, objective: str, limit: Limit) -> Chain | None:
        """The best chain within the limit, ties broken by the other objective; None if there is none."""
        if objective == "variance":
            return self._least(limit, squares=True)
        first = self._least(limit, squares=False)
        return first and self._least(limit.within(first.most), squares=True)

    def bands(self, limit: Limit) -> list[Rows]:
        """Per boundary 0 … k the rows that may be there; all within the limit are among them."""
        k = self.problem.k
        everything, nothing = np.array([len(self.family) - 1], np.intp), np.array([0], np.intp)
        return [nothing, *(self._band(s, limit) for s in range(1, k)), everything]

    def _band(self, boundary: int, limit: Limit) -> Rows:
        rows = self.near.get(boundary, np.arange(len(self.family), dtype=np.intp))
        rows = rows[self._pinned(boundary)[rows]]
        return rows[limit.allows(*self._ends(boundary, rows), self.problem, boundary)]

    def _pinned(self, boundary: int) -> Mask:
        """Where all units are in the ideal that must be, and none that must not."""
        low, high = self.family.instance.windows
        fits = np.ones(len(self.family), np.bool_)
        for unit in self.family.instance.decided:
            if high[unit] < boundary:
                fits &= self.family.holds(unit)
            elif low[unit] >= boundary:
                fits &= ~self.family.holds(unit)
        return fits

    def _ends(self, boundary: int, rows: Rows) -> tuple[Integers, Integers]:
        """The least that the stages below and above a boundary do in all."""
        sums = self.family.sums
        paid = np.zeros(len(rows), np.int64)
        if self.problem.speeds is None and self.problem.communication in ("relay", "endpoint"):
            paid = self.family.crossing(self.problem.hop(boundary - 1))[rows]
        below = sums.compute[0, rows] + paid
        above = sums.compute[1, -1] - sums.compute[1, rows] + paid
        return below, above

    def pairs(self, limit: Limit) -> int:
        """How many stages the search would look at, at most; those that are harder to price count more."""
        bands, compute = self.bands(limit), self.family.sums.compute[0]
        total = 0
        for stage in range(self.problem.k):
            a, b, most = (
                compute[bands[stage]],
                compute[bands[stage + 1]],
                self._most_compute(stage, limit),
            )
            low = 0 if most is None else np.searchsorted(a, b - most)
            total += int((np.searchsorted(a, b, side="right") - low).sum())
        return total * self.effort

    @property
    def effort(self) -> int:
        """How much more than one a pair costs to look at."""
        exact = self.problem.communication == "endpoint" and not self.rough
        choices = (self.ranks - self.problem.k + 1) ** 2
        return choices * (1 + self.family.instance.width // 8) if exact else choices

    def _blocks(self, a: Rows, b: Rows, stage: int, limit: Limit) -> Iterator[tuple[Rows, Rows]]:
        """Pairs of rows in blocks, without those whose compute alone is too much or negative."""
        if not len(a) or not len(b):
            return
        compute, most = self.family.sums.compute[0], self._most_compute(stage, limit)
        width = max(1, BLOCK // len(a))
        for start in range(0, len(b), width):
            part = b[start : start + width]
            low = (
                0 if most is None else int(np.searchsorted(compute[a], compute[part].min() - most))
            )
            high = int(np.searchsorted(compute[a], compute[part].max(), side="right"))
            if low < high:
                yield a[low:high], part

    def _most_compute(self, stage: int, limit: Limit) -> int | None:
        if limit.load is None or stage == self.problem.k - 1:
            return None
        return int(limit.load * self.problem.speed(stage) * (self.ranks - self.problem.k + 1))

    def loads(self, a: Rows, b: Rows, stage: int) -> Integers:
        """The load of every pair as `stage` on one rank; pairs that cannot be give nonsense."""
        problem, sums = self.problem, self.family.sums
        compute = sums.compute[int(stage == problem.k - 1)]
        load = compute[b][None, :] - compute[a][:, None]
        if problem.speeds is not None:
            speed = problem.speed(stage)
            load = -(-load * speed.denominator // speed.numerator)
        before = problem.hop(stage - 1) if stage else None
        after = problem.hop(stage) if stage < problem.k - 1 else None
        transfers = (
            self.family.crossing(before)[a][:, None] + self.family.crossing(after)[b][None, :]
        )
        if problem.communication == "endpoint" and not self.rough:
            transfers = transfers - self.family.passing(a, b, before and after)
        result: Integers = (
            np.maximum(load, transfers) if problem.communication == "overlap" else load + transfers
        )
        return result

    def possible(self, a: Rows, b: Rows, stage: int) -> Mask:
        """Which pairs may be `stage`: one ideal in the other, within its memory, with parameters if it must."""
        problem, sums = self.problem, self.family.sums
        fits = self.family.inside(a, b)
        if problem.memory is not None:
            fits &= self.payments.over(a, b, stage) <= 0
        if problem.parameters_everywhere:
            fits &= sums.parameters[b][None, :] > sums.parameters[a][:, None]
        return fits

    def _least(self, limit: Limit, *, squares: bool) -> Chain | None:
        """The chain of least Σ load², then least maximum; or of least maximum alone."""
        bands, k = self.bands(limit), self.problem.k
        cost = _Squares.of(self, limit) if squares else _Nothing()
        layers = [{0: _Layer.start(cost.kind)}]
        for stage in range(k):
            layers.append(self._step(stage, bands, layers[-1], cost, limit))
        ends = [
            (layer.total[0], layer.peak[0], used)
            for used, layer in layers[k].items()
            if layer.reached[0]
        ]
        return _walk_back(layers, bands, min(ends)[2]) if ends else None

    def _step(
        self,
        stage: int,
        bands: list[Rows],
        before: dict[int, _Layer],
        cost: _Squares | _Nothing,
        limit: Limit,
    ) -> dict[int, _Layer]:
        """One stage more: the best value of each row of the next band, by how many ranks are used."""
        live = np.flatnonzero(np.logical_or.reduce([layer.reached for layer in before.values()]))
        a, b = bands[stage][live], bands[stage + 1]
        left = self.problem.k - stage - 1
        after = {
            used: _Layer.empty(len(b), cost.kind)
            for used in range(stage + 1, self.ranks - left + 1)
        }
        for part, some in self._blocks(a, b, stage, limit):
            load, fits = self.loads(part, some, stage), self.possible(part, some, stage)
            self.payments.add(part, some, stage, load, fits)
            rows, columns = live[np.searchsorted(a, part)], np.searchsorted(b, some)
            for used, layer in before.items():
                for replicas in range(1, self.ranks - left - used + 1):
                    shared = self._shared(load, part, some, replicas)
                    ok = fits if limit.load is None else fits & (shared <= limit.load)
                    spent = cost(shared, part, some)
                    after[used + replicas].improve(
                        columns, layer, rows, replicas, spent, shared, ok
                    )
        return after

    def _shared(self, load: Integers, a: Rows, b: Rows, replicas: int) -> Integers:
        """The load of a stage on several ranks, with the reduction of its gradients."""
        if replicas == 1:
            return load
        weights = self.family.sums.parameters[b][None, :] - self.family.sums.parameters[a][:, None]
        sizes, where = np.unique(weights, return_inverse=True)
        reduction = np.array(
            [self.problem.reduction_ns(max(int(size), 0), replicas) for size in sizes], np.int64
        )
        result: Integers = -(-load // replicas) + reduction[where].reshape(load.shape)
        return result


class _Nothing:
    """With a cost of zero, the least maximum decides."""

    kind = np.int64

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        return np.zeros_like(load)


@dataclass(frozen=True)
class _Squares:
    """Σ load² less what all chains have in common, so that it stays small.

    With μ near the mean load and c the compute of a stage, load² = (load − μ)² + 2μ·(load − c) + 2μ·c − μ², and the
    last two terms sum to the same over every chain. `kind` holds them: 64 bits, or Python integers if too large.
    """

    compute: Integers
    mean: int
    kind: type

    @staticmethod
    def of(chains: Chains, limit: Limit) -> _Squares:
        problem, sums = chains.problem, chains.family.sums
        total, speeds = (
            int(sums.compute[0, -1]),
            [problem.speed(stage) for stage in range(problem.k)],
        )
        crossing = max(
            (int(sums.crossing[hop].max()) for hop in chains.family.instance.hops), default=0
        )
        priced = chains.payments.most
        spare = chains.ranks - problem.k
        reduction = problem.reduction_ns(int(sums.parameters[-1]), spare + 1) if spare else 0
        most = int(total / min(speeds)) + 1 + 2 * crossing + priced + reduction
        load = most if limit.load is None else limit.load
        mean, own = total // chains.ranks, int(load * max([*speeds, Fraction(1)])) * chains.ranks
        fits = problem.k * (max(load, mean) ** 2 + 2 * mean * max(load, own)) < 2**62
        return _Squares(sums.compute[0], mean, np.int64 if fits else object)

    def __call__(self, load: Integers, a: Rows, b: Rows) -> Integers:
        load = load.astype(self.kind)
        compute: Integers = self.compute.astype(self.kind)
        own = compute[b][None, :] - compute[a][:, None]
        result: Integers = (load - self.mean) ** 2 + 2 * self.mean * (load - own)
        return result


@dataclass(frozen=True)
class _Layer:
    """Per row of a band the best chain so far: its cost and largest load, the row before, the last stage's ranks."""

    total: Integers
    peak: Integers
    reached: Mask
    whence: NDArray[np.intp]
    replicas: NDArray[np.intp]

    @staticmethod
    def start(kind: type) -> _Layer:
        """The empty chain."""
        layer = _Layer.empty(1, kind)
        layer.reached[0] = True
        return layer

    @staticmethod
    def empty(count: int, kind: type) -> _Layer:
        return _Layer(
            np.zeros(count, kind),
            np.zeros(count, np.int64),
            np.zeros(count, np.bool_),
            np.zeros(count, np.intp),
            np.zeros(count, np.intp),
        )

    def improve(
        self,
        columns: Rows,
        before: _Layer,
        rows: Rows,
        replicas: int,
        spent: Integers,
        load: Integers,
        fits: Mask,
    ) -> None:
        """Takes, in place, what is better by cost and then by the largest load; the first of equals stays."""
        fits = fits & before.reached[rows][:, None]
        if not fits.any():
            return
        total = before.total[rows][:, None] + spent
        total[~fits] = total[fits].max() + 1
        least = total.min(axis=0)
        peak = np.maximum(before.peak[rows][:, None], load)
        peak[total != least] = peak.max() + 1
        choice, every = peak.argmin(axis=0), np.arange(len(columns))
        worst, some = peak[choice, every], fits.any(axis=0)
        was, high = self.total[columns], self.peak[columns]
        better = some & (~self.reached[columns] | (least < was) | ((least == was) & (worst < high)))
        chosen = columns[better]
        self.total[chosen], self.peak[chosen] = least[better], worst[better]
        self.whence[chosen], self.replicas[chosen], self.reached[chosen] = (
            rows[choice[better]],
            replicas,
            True,
        )


def _walk_back(layers: list[dict[int, _Layer]], bands: list[Rows], used: int) -> Chain:
    rows, replicas, at = [int(bands[-1][0])], list[int](), 0
    most = int(layers[-1][used].peak[0])
    for stage in range(len(layers) - 1, 0, -1):
        layer = layers[stage][used]
        replicas.append(int(layer.replicas[at]))
        used, at = used - replicas[-1], int(layer.whence[at])
        rows.append(int(bands[stage - 1][at]))
    return Chain(tuple(reversed(rows)), tuple(reversed(replicas)), most)
