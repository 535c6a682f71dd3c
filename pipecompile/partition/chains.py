"""The best chain of boundaries of a family, by dynamic programming over stages.

The best chain that ends in an ideal at boundary s + 1 extends one of the best chains at boundary s
by a stage (PipeDream, arXiv 1806.03377, section 3.1, for intervals; Tarnawski et al., NeurIPS 2020,
for ideals). The table of the diamond a → b, c → d with 2, 3, 1 and 4 ns, k = 2, for the largest
load:

    boundary 0     boundary 1                        boundary 2
        ∅  0 ──┬──▶ a    2  ── stage bcd  8 ──┐
               ├──▶ ab   5  ── stage cd   5 ──┼──▶  abcd   5, by ab | cd
               ├──▶ ac   3  ── stage bd   7 ──┤
               └──▶ abc  6  ── stage d    4 ──┘

A known value keeps few ideals live: the compute below a boundary and above it must fit the stages
there. So the *band* of a boundary, the rows that may be there, is small. Within the limit 5 the
band of boundary 1 is ab alone: above a and ac lie 8 and 7 ns, and abc itself takes 6.

Everything is exact, in whole arrays of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipecompile.partition.boundaries import Boundaries, Rows
from pipecompile.partition.chain_costs import ChainCost, NoCost, SquaresCost, TotalCost
from pipecompile.partition.layers import Layer
from pipecompile.partition.payments import Payments
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import Integers, Mask
from pipecompile.partition.windows import Limit

__all__ = ["Chain", "Chains"]

BLOCK_PAIRS = 1 << 21  # pairs of ideals whose costs are in memory together


@dataclass(frozen=True)
class Chain:
    """A cut: the rows of boundaries 0 … k, the ranks of each stage, and the largest load."""

    rows: tuple[int, ...]
    replicas: tuple[int, ...]
    most: int


@dataclass
class Chains:
    """All chains of a family of boundaries, and the search for the best one.

    `near` restricts boundaries to some rows. `payments` says what stages pay to fit their memory.
    If `rough`, `endpoint` is charged as `relay`, which is faster to compute and never charges less.
    """

    family: Boundaries
    near: dict[int, Rows] = field(default_factory=dict)
    rough: bool = False

    @cached_property
    def payments(self) -> Payments:
        """What stages pay, as far as it is known."""
        return Payments(self.family)

    @property
    def problem(self) -> PartitionProblem:
        """The problem that the chains are cuts of."""
        return self.family.unit_graph.problem

    @cached_property
    def ranks(self) -> int:
        """The number of ranks of all stages together, replicas included."""
        return self.problem.replica_ranks or self.problem.k

    @property
    def _replicas_max(self) -> int:
        """The most ranks that one stage may have."""
        return self.ranks - self.problem.k + 1

    def best(self, objective: str, limit: Limit) -> Chain | None:
        """Return the best chain within the limit; None without one.

        Another objective breaks ties: the largest load, for sums of loads or of their squares.

        For the largest load: the least one first, then the least Σ load² among chains that have it.
        """
        if objective == "total-load":
            return self._least(limit, TotalCost())
        if objective == "variance":
            return self._least(limit, self._squares(limit))
        first = self._least(limit, NoCost())
        if first is None:
            return None
        even = limit.within(first.most)
        return self._least(even, self._squares(even))

    def _squares(self, limit: Limit) -> SquaresCost:
        return SquaresCost.of(self.family, self.ranks, self.payments.most_ns, limit)

    # Which ideals and which pairs are looked at

    def bands(self, limit: Limit) -> list[Rows]:
        """Return, per boundary 0 … k, the rows that may be there.

        No chain within the limit is lost.
        """
        everything, nothing = np.array([len(self.family) - 1], np.intp), np.array([0], np.intp)
        return [
            nothing,
            *(self._band(boundary, limit) for boundary in range(1, self.problem.k)),
            everything,
        ]

    def _band(self, boundary: int, limit: Limit) -> Rows:
        # Pins first: they are cheaper to test than limits.
        rows = self.near.get(boundary, np.arange(len(self.family), dtype=np.intp))
        rows = rows[self._meets_pins(boundary)[rows]]
        below, above = self._least_times(boundary, rows)
        return rows[limit.allows(below, above, self.problem, boundary)]

    def _meets_pins(self, boundary: int) -> Mask:
        """Return, per ideal, whether its boundary agrees with the pins."""
        low, high = self.family.unit_graph.pin_windows
        meets = np.ones(len(self.family), np.bool_)
        for unit in self.family.unit_graph.restricted:
            if high[unit] < boundary:
                meets &= self.family.has_unit(unit)
            elif low[unit] >= boundary:
                meets &= ~self.family.has_unit(unit)
        return meets

    def _least_times(self, boundary: int, rows: Rows) -> tuple[Integers, Integers]:
        """Return lower bounds of the time of all stages below a boundary and of all above it."""
        sums = self.family.sums
        # What crosses this boundary is paid by the stage below it and by the one above, so it
        # counts twice. With other speeds or communications it is left out: a bound all the same.
        transfers = np.zeros(len(rows), np.int64)
        if self.problem.speeds is None and self.problem.communication in ("relay", "endpoint"):
            transfers = self.family.crossing(self.problem.hop(boundary - 1))[rows]
        below = sums.compute[0, rows] + transfers
        above = sums.compute[1, -1] - sums.compute[1, rows] + transfers
        return below, above

    def pairs(self, limit: Limit) -> int:
        """Return an upper bound of the work of the search, in pairs of rows that it looks at."""
        bands, compute = self.bands(limit), self.family.sums.compute[0]
        total = 0
        for stage in range(self.problem.k):
            a, b = compute[bands[stage]], compute[bands[stage + 1]]
            most = self._most_compute(stage, limit)
            # Both bands ascend with compute. So the partners of b are those
            # with compute in [b − most, b], and two searches in a count them.
            first = 0 if most is None else np.searchsorted(a, b - most)
            total += int((np.searchsorted(a, b, side="right") - first).sum())
        return total * self.pair_cost

    @property
    def pair_cost(self) -> int:
        """The work of looking at one pair, in pairs of the simplest problem."""
        replica_choices = self._replicas_max**2
        if self.problem.communication != "endpoint" or self.rough:
            return replica_choices
        return replica_choices * (1 + self.family.unit_graph.width // 8)

    def _blocks(self, a: Rows, b: Rows, stage: int, limit: Limit) -> Iterator[tuple[Rows, Rows]]:
        """Yield all pairs of a and b in blocks, without most of those that no stage can have.

        Those are pairs with too much or negative compute.

        Rows ascend with compute, so the pairs worth looking at lie in a diagonal strip.
        """
        if not len(a) or not len(b):
            return
        compute, most = self.family.sums.compute[0], self._most_compute(stage, limit)
        width = max(1, BLOCK_PAIRS // len(a))
        for start in range(0, len(b), width):
            part = b[start : start + width]
            first = 0
            if most is not None:
                first = int(np.searchsorted(compute[a], compute[part].min() - most))
            stop = int(np.searchsorted(compute[a], compute[part].max(), side="right"))
            if first < stop:
                yield a[first:stop], part

    def _most_compute(self, stage: int, limit: Limit) -> int | None:
        """Return the most compute of a stage within the limit.

        It is None if the limit bounds no load, and for the last stage.

        The compute of the last stage is counted otherwise: it does not recompute.
        """
        if limit.load is None or stage == self.problem.k - 1:
            return None
        return int(limit.load * self.problem.speed(stage) * self._replicas_max)

    # What a stage costs

    def loads(self, a: Rows, b: Rows, stage: int) -> Integers:
        """Return (len(a), len(b)): the load in ns of each pair as `stage` on one rank.

        Transfers are included.

        Pairs that are no stage have no meaning.
        """
        problem, sums = self.problem, self.family.sums
        compute = sums.compute_on(problem.kind(stage))[int(stage == problem.k - 1)]
        load = compute[b][None, :] - compute[a][:, None]
        if problem.speeds is not None:
            speed = problem.speed(stage)
            # Rounded up, as `objective.stage_loads` does.
            load = -(-load * speed.denominator // speed.numerator)
        before = problem.hop(stage - 1) if stage else None
        after = problem.hop(stage) if stage < problem.k - 1 else None
        received, sent = self.family.crossing(before)[a], self.family.crossing(after)[b]
        transfers = received[:, None] + sent[None, :]
        if problem.communication == "endpoint" and not self.rough:
            # The first and the last stage have one boundary only, which no flow crosses twice.
            transfers = transfers - self.family.relay_surplus(a, b, before and after)
        overlaps = problem.communication == "overlap"
        result: Integers = np.maximum(load, transfers) if overlaps else load + transfers
        return result

    def possible(self, a: Rows, b: Rows, stage: int) -> Mask:
        """Return (len(a), len(b)): whether the pair may be `stage`.

        One ideal is a subset of the other, and the stage meets its memory and has the parameters
        that it must have.
        """
        sums = self.family.sums
        fits = self.family.is_subset(a, b)
        if self.problem.memory is not None:
            fits &= self.payments.least_excess(a, b, stage) <= 0
        if self.problem.parameters_everywhere:
            fits &= sums.parameters[b][None, :] > sums.parameters[a][:, None]
        return fits

    def _divided(self, load: Integers, a: Rows, b: Rows, replicas: int) -> Integers:
        """Return the load of a stage on `replicas` ranks, with the all-reduce of its gradients."""
        if replicas == 1:
            return load
        parameters = self.family.sums.parameters
        sizes = parameters[b][None, :] - parameters[a][:, None]
        # Few sizes are different, and `reduction_ns` counts in exact Python integers.
        different, where = np.unique(sizes, return_inverse=True)
        reduction = np.array(
            [self.problem.reduction_ns(max(int(size), 0), replicas) for size in different],
            np.int64,
        )
        divided, reduced = -(-load // replicas), reduction[where].reshape(load.shape)
        overlaps = self.problem.communication == "overlap"
        result: Integers = np.maximum(divided, reduced) if overlaps else divided + reduced
        return result

    # The dynamic program

    def _least(self, limit: Limit, cost: ChainCost) -> Chain | None:
        """Return the chain of least cost; None without one.

        Of chains with equal cost it is one of least largest load.
        """
        bands = self.bands(limit)
        layers = [{0: Layer.start(cost.kind)}]  # per boundary: the layer by number of ranks used
        for stage in range(self.problem.k):
            layers.append(self._next_layer(stage, bands, layers[-1], cost, limit))
        ends = [
            (layer.total[0], layer.peak[0], used)
            for used, layer in layers[-1].items()
            if layer.reached[0]
        ]
        # Fewer ranks than there are may be enough: a replica's
        # all-reduce may cost more than it saves.
        return _chain_back_from(layers, bands, min(ends)[2]) if ends else None

    def _next_layer(
        self,
        stage: int,
        bands: list[Rows],
        before: dict[int, Layer],
        cost: ChainCost,
        limit: Limit,
    ) -> dict[int, Layer]:
        """Return the chains of one stage more, by the number of ranks that they use."""
        # Rows that no chain reaches need not be extended.
        reached = np.logical_or.reduce([layer.reached for layer in before.values()])
        live = np.flatnonzero(reached)
        a, b = bands[stage][live], bands[stage + 1]
        stages_left = self.problem.k - stage - 1
        ranks_max = self.ranks - stages_left  # each stage that is left needs a rank
        after = {used: Layer.empty(len(b), cost.kind) for used in range(stage + 1, ranks_max + 1)}
        for begins, ends in self._blocks(a, b, stage, limit):
            # Loads are for one rank; replicas divide them below.
            load, fits = self.loads(begins, ends, stage), self.possible(begins, ends, stage)
            self.payments.add(begins, ends, stage, load, fits)
            rows, columns = live[np.searchsorted(a, begins)], np.searchsorted(b, ends)
            for used, layer in before.items():
                for replicas in range(1, ranks_max - used + 1):
                    divided = self._divided(load, begins, ends, replicas)
                    allowed = fits if limit.load is None else fits & (divided <= limit.load)
                    stage_cost = cost(divided, begins, ends)
                    after[used + replicas].improve(
                        columns, layer, rows, replicas, stage_cost, divided, allowed
                    )
        return after


def _chain_back_from(layers: list[dict[int, Layer]], bands: list[Rows], used: int) -> Chain:
    """Return the best chain that uses this many ranks, read from its end to its beginning."""
    rows, replicas, at = [int(bands[-1][0])], list[int](), 0
    most = int(layers[-1][used].peak[0])
    for stage in range(len(layers) - 1, 0, -1):
        layer = layers[stage][used]
        replicas.append(int(layer.replicas[at]))
        used, at = used - replicas[-1], int(layer.previous[at])
        rows.append(int(bands[stage - 1][at]))
    return Chain(tuple(reversed(rows)), tuple(reversed(replicas)), most)
