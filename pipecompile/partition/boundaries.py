"""Families of boundaries, over which one dynamic program (`chains`) finds the best cut.

The boundary after a stage is given by the units that run before it. That set contains all
predecessors of its members: it is an *ideal* of the graph of units. A cut into k stages is a chain
of ideals ∅ = I₀ ⊂ I₁ ⊂ … ⊂ I_k, and stage s is the difference I_{s+1} − I_s. For a diamond and k =
2:

          b                 ideals: ∅, a, ab, ac, abc, abcd
        ↗   ↘               one cut: ∅ ⊂ ab ⊂ abcd, the stages ab and cd
      a       d
        ↘   ↗               not an ideal: bd, as it lacks a
          c

The compute and the bytes of a stage, and what `relay` charges for its transfers, are sums over its
two ideals. So a family keeps one number per ideal for each of them, and the cost of a stage is a
difference of two numbers:

      ideal           ∅    a    ab   abc  abcd      a: 2 ns, b: 3 ns, c: 1 ns, d: 4 ns
      Σ compute       0    2    5    6    10        the stage cd has compute 10 − 5 = 5

There are two kinds of family: the prefixes of one order of the units (`prefixes`), and lists of
ideals (`ideals`). All ideals of the graph are the family of every cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.links import Hop
from pipecompile.partition.unit_graph import CrossingKind, Integers, Mask, UnitGraph

__all__ = ["Boundaries", "BoundarySums", "Rows"]

Rows = NDArray[np.intp]
FLOAT_EXACT = 2**53  # floating-point numbers hold all integers below this


@dataclass(frozen=True)
class BoundarySums:
    """Sums over the units of each ideal of a family, and over the flows that cross its boundary.

    The last axis of each array is the ideal.
    """

    compute: Integers  # (2, ideals): in stages that are not the last, and in the last stage
    kind_compute: Integers  # (kinds, 2, ideals): the same on each of several kinds of devices
    resident: Integers
    saved: Integers
    freeable: Integers  # (classes, ideals)
    parameters: Integers
    crossing: Mapping[CrossingKind, Integers]

    def compute_on(self, kind: int) -> Integers:
        """Return (2, ideals): the compute on a kind of device."""
        result: Integers = self.kind_compute[kind] if len(self.kind_compute) else self.compute
        return result

    def mapped(self, change: Callable[[Integers], Integers]) -> BoundarySums:
        """Return the sums with `change` applied to each array."""
        return BoundarySums(
            compute=change(self.compute),
            kind_compute=change(self.kind_compute),
            resident=change(self.resident),
            saved=change(self.saved),
            freeable=change(self.freeable),
            parameters=change(self.parameters),
            crossing={kind: change(values) for kind, values in self.crossing.items()},
        )

    @staticmethod
    def concatenated(parts: Sequence[BoundarySums]) -> BoundarySums:
        """Return the sums of several lists of ideals, one list after the other."""

        def join(arrays: Sequence[Integers]) -> Integers:
            return np.concatenate(arrays, axis=-1)

        return BoundarySums(
            compute=join([part.compute for part in parts]),
            kind_compute=join([part.kind_compute for part in parts]),
            resident=join([part.resident for part in parts]),
            saved=join([part.saved for part in parts]),
            freeable=join([part.freeable for part in parts]),
            parameters=join([part.parameters for part in parts]),
            crossing={
                kind: join([part.crossing[kind] for part in parts]) for kind in parts[0].crossing
            },
        )


class Boundaries(ABC):
    """A family of ideals, numbered by row in ascending order of compute.

    Row 0 is the empty ideal and the last row holds all units. Methods take arrays of rows: pairs of
    rows (a, b) stand for the stage between the two ideals, and results for all pairs have the shape
    (len(a), len(b)).
    """

    unit_graph: UnitGraph
    sums: BoundarySums

    def __len__(self) -> int:
        """Return the number of ideals."""
        return len(self.sums.resident)

    @abstractmethod
    def is_subset(self, a: Rows, b: Rows) -> Mask:
        """Return for each pair whether ideal a is a strict subset of ideal b: (len(a), len(b))."""

    @abstractmethod
    def crossing_states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """Return the crossing state of each flow at each boundary, as (len(rows), len(flows)).

        It is 1 + the number of the flow's consumers in the ideal, and 0 where the flow does not
        cross.
        """

    @abstractmethod
    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """Return the flows that may cross the boundary of an ideal of a and that of one of b."""

    @abstractmethod
    def members(self, row: int) -> Mask:
        """Return, per unit, whether it is in the ideal."""

    @abstractmethod
    def has_unit(self, unit: int) -> Mask:
        """Return, per ideal, whether the unit is in it."""

    def crossing(self, hop: Hop | None) -> Integers:
        """Return, per ideal, the ns of all crossing values and gradients over a hop.

        It is 0 without a hop.
        """
        # Without a hop both stages lie on one rank, where nothing is sent.
        return np.zeros(len(self), np.int64) if hop is None else self.sums.crossing[hop]

    def relay_surplus(self, a: Rows, b: Rows, hop: Hop | None) -> Integers:
        """Return (len(a), len(b)): the time that only `relay` charges to a stage, not `endpoint`.

        `relay` charges a stage for each boundary that a flow crosses, `endpoint` once for each flow
        of which it holds some ends but not all. They differ for flows that cross both boundaries:

            producer │ stage  │ consumer      relay w + w, endpoint 0: surplus 2 w
                 ●───┼────────┼──▶●
                     │        │
            producer │consumer│ consumer      relay w + w, endpoint w: surplus w
                 ●───┼──▶●────┼──▶●
                     a        b

        A stage without a consumer is one where both ideals hold as many consumers: the flow has the
        same crossing state at a and at b. So the surplus is w for each flow that crosses both, and
        once more where its states are equal.
        """
        flows = self.crossing_flows(a, b)
        if hop is None or not flows:
            return np.zeros((len(a), len(b)), np.int64)
        weights = self.unit_graph.weights(hop)[list(flows)]
        # For flows of 5 and 7 ns that both cross at a, and of which only the second crosses at b,
        # the product is (5, 7) · (0, 1) = 7: what crosses both boundaries.
        # Products of floating-point matrices are fast, and exact while sums stay below 2^53.
        kind = np.float64 if 2 * int(weights.sum()) < FLOAT_EXACT else np.int64
        left, right = self.crossing_states(a, flows), self.crossing_states(b, flows)

        def total(at_a: Mask, at_b: Mask) -> Integers:
            """Return, for all pairs, Σ weight of the flows that have the property at a and at b."""
            product: Integers = (at_a * weights).astype(kind) @ at_b.T.astype(kind)
            return product

        # The flow of 7 ns costs 7 more if the stage has one of its consumers, else 14. A state is
        # the number of consumers before a boundary, plus 1: if it rises, the stage has a consumer.
        surplus = total(left > 0, right > 0)
        for state in range(1, int(max(left.max(), right.max())) + 1):
            surplus += total(left == state, right == state)
        return surplus.astype(np.int64)
