"""The family of the prefixes of one topological order: its cuts are into intervals of the order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pipecompile.partition.boundaries import Boundaries, BoundarySums, Rows
from pipecompile.partition.unit_graph import Integers, Mask, UnitGraph

__all__ = ["Prefixes"]


class Prefixes(Boundaries):
    """The prefixes of a topological `order` of the units: row i holds the first i units.

    `place` is the position of each unit in the order.
    """

    def __init__(self, unit_graph: UnitGraph, order: Sequence[int]) -> None:
        self.unit_graph, self.order = unit_graph, np.asarray(order, np.intp)
        self.place = np.empty(unit_graph.count, np.intp)
        self.place[self.order] = np.arange(unit_graph.count)
        self.sums = BoundarySums(
            compute=_prefix_sums(unit_graph.compute[:, self.order]),
            kind_compute=_prefix_sums(unit_graph.kind_compute[..., self.order]),
            resident=_prefix_sums(unit_graph.resident[self.order]),
            saved=_prefix_sums(unit_graph.saved[self.order]),
            freeable=_prefix_sums(unit_graph.freeable[:, self.order]),
            parameters=_prefix_sums(unit_graph.parameters[self.order]),
            crossing={
                kind: self._crossing_sums(unit_graph.weights(kind))
                for kind in unit_graph.crossing_kinds
            },
        )

    @cached_property
    def flow_spans(self) -> tuple[Integers, Integers]:
        """Per flow the places of its producer and of its last consumer."""
        producers, consumers, starts = self.unit_graph.flow_ends
        if not len(starts):
            return self.place[producers], np.zeros(0, np.intp)
        return self.place[producers], np.maximum.reduceat(self.place[consumers], starts)

    def _crossing_sums(self, weights: Integers) -> Integers:
        """Return, per prefix, the weight of the flows that cross its boundary.

        A flow with producer at place p and last consumer at place c crosses the rows p + 1 … c. Its
        weight is added at p + 1 and subtracted at c + 1, and a running sum does the rest:

            row       0    1    2    3    4        p = 0, c = 2, weight 7
            change    0   +7    0   −7    0
            sum       0    7    7    0    0
        """
        # Each flow changes the sum at two rows: linear in flows, not flows × rows.
        producers, last_consumers = self.flow_spans
        change = np.zeros(self.unit_graph.count + 1, np.int64)
        np.add.at(change, producers + 1, weights)
        np.subtract.at(change, last_consumers + 1, weights)
        return change.cumsum()

    def is_subset(self, a: Rows, b: Rows) -> Mask:
        """Return for each pair whether ideal a is a strict subset of ideal b: (len(a), len(b))."""
        result: Mask = a[:, None] < b[None, :]
        return result

    def crossing_states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """Return the crossing state of each flow at each boundary, as (len(rows), len(flows))."""
        states = np.zeros((len(rows), len(flows)), np.int64)
        for column, index in enumerate(flows):
            flow = self.unit_graph.flows[index]
            consumers = np.sort(self.place[list(flow.consumers)])
            # Row i has the units at places 0 … i − 1.
            crosses = (self.place[flow.producer] < rows) & (rows <= consumers[-1])
            states[:, column] = crosses * (1 + np.searchsorted(consumers, rows))
        return states

    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """Return the flows that may cross the boundary of an ideal of a and that of one of b."""
        producers, last_consumers = self.flow_spans
        # Necessary for any pair: produced before the latest a, and consumed after the earliest b.
        # Row i has places 0 … i − 1, so a producer at place p
        # is below the boundary of row p + 1 on.
        may_cross_both = (producers < a.max()) & (last_consumers >= b.min())
        flows: list[int] = np.flatnonzero(may_cross_both).tolist()
        return flows

    def members(self, row: int) -> Mask:
        """Return, per unit, whether it is in the ideal."""
        result: Mask = self.place < row
        return result

    def has_unit(self, unit: int) -> Mask:
        """Return, per ideal, whether the unit is in it."""
        result: Mask = np.arange(len(self)) > self.place[unit]
        return result


def _prefix_sums(values: Integers) -> Integers:
    """Return the sums of all prefixes along the last axis, from the empty one on.

    For example, [2, 3] gives [0, 2, 5].
    """
    empty = np.zeros((*values.shape[:-1], 1), values.dtype)
    result: Integers = np.concatenate([empty, values.cumsum(axis=-1)], axis=-1)
    return result
