"""The graph of units as arrays: what every search of this package works on.

A unit is a set of nodes that share a stage (see `units`). Tensors between the same units are joined
to a flow. All arrays are indexed by unit or by flow and hold exact integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import Tensor
from pipecompile.ir.links import Hop
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.units import Unit

__all__ = ["CrossingKind", "Flow", "Integers", "Mask", "UnitGraph", "reachable_weight"]

# What is summed over the flows that cross a boundary: their transfer times over a hop, or the bytes
# of their buffers, by the name of the field of `BoundaryBuffers`.
CrossingKind = Hop | str
BITSET_UNITS_MAX = 16_384  # a set of units for each unit then takes units² / 8 = 32 MiB
UNPACKED_ROWS = 1024  # sets that are unpacked at a time

Integers = NDArray[Any]  # int64, or Python integers where squares do not fit
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Flow:
    """The tensors from one unit to the same other units.

    `sizes` are the bytes and the gradient bytes of each tensor, `names` the nodes that produce
    them.
    """

    producer: int
    consumers: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    names: tuple[str, ...]

    def transfer_ns(self, hop: Hop) -> int:
        """Return the time that the values and their gradients take over a hop."""
        return sum(hop.transfer_ns(value, gradient) for value, gradient in self.sizes)


@dataclass(frozen=True)
class UnitGraph:
    """The graph of a problem over `units`, its own or merged ones, in a topological order."""

    problem: PartitionProblem
    units: tuple[Unit, ...]

    @staticmethod
    def of(problem: PartitionProblem) -> UnitGraph:
        """Return the graph over the problem's own units.

        Raise InfeasibleError if pins contradict its order.
        """
        unit_graph = UnitGraph(problem, problem.units)
        unit_graph.refuse_contradictions()
        return unit_graph

    @property
    def k(self) -> int:
        """The number of stages."""
        return self.problem.k

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.units)

    @cached_property
    def position(self) -> dict[str, int]:
        """The unit of each node."""
        return {name: index for index, unit in enumerate(self.units) for name in unit}

    # Edges

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The tensors that go from unit to unit; those with the same ends are one flow."""
        by_ends: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}
        for tensor in self.problem.graph.tensors:
            producer = self.position[tensor.producer]
            readers = {self.position[name] for name in tensor.consumers} - {producer}
            # A tensor that stays in its unit never crosses a boundary.
            if readers:
                by_ends.setdefault((producer, tuple(sorted(readers))), []).append(tensor)
        flows = []
        for (producer, consumers), tensors in by_ends.items():
            sizes = tuple((tensor.bytes, tensor.gradient_bytes) for tensor in tensors)
            names = tuple(tensor.producer for tensor in tensors)
            flows.append(Flow(producer, consumers, sizes, names))
        return tuple(flows)

    @cached_property
    def flow_ends(self) -> tuple[Integers, Integers, Integers]:
        """Producers, consumers, starts: consumers[starts[i]:starts[i + 1]] are those of flow i.

        Flows 0 → 1, 2 and 1 → 2 give [0, 1], [1, 2, 2] and [0, 2].
        """
        counts = [len(flow.consumers) for flow in self.flows]
        producers = _array([flow.producer for flow in self.flows])
        consumers = _array([unit for flow in self.flows for unit in flow.consumers])
        # The slice is for graphs without flows, where there is no start.
        starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)[: len(counts)]
        return producers, consumers, starts

    def crosses(self, members: Mask) -> Mask:
        """Return, per flow, whether it crosses the boundary after the ideal with these members.

        `members` is per unit.

        Its producer is in the ideal, and not all of its consumers are.
        """
        producers, consumers, starts = self.flow_ends
        if not len(producers):
            return np.zeros(0, np.bool_)
        # `reduceat` gives one value for each start, over the consumers up to the next
        # start. It would be wrong for a flow without consumers, of which there are none.
        result: Mask = members[producers] & ~np.logical_and.reduceat(members[consumers], starts)
        return result

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The direct predecessors of each unit, by tensors and by `precedence`."""
        sources: list[set[int]] = [set() for _ in self.units]
        for flow in self.flows:
            for consumer in flow.consumers:
                sources[consumer].add(flow.producer)
        for first, then in self.problem.precedence:
            if self.position[first] != self.position[then]:
                sources[self.position[then]].add(self.position[first])
        return tuple(tuple(sorted(units)) for units in sources)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The direct successors of each unit."""
        targets: list[list[int]] = [[] for _ in self.units]
        for consumer, sources in enumerate(self.before):
            for source in sources:
                targets[source].append(consumer)
        return tuple(map(tuple, targets))

    @cached_property
    def produced(self) -> tuple[tuple[int, ...], ...]:
        """The flows that each unit produces."""
        flows: list[list[int]] = [[] for _ in self.units]
        for index, flow in enumerate(self.flows):
            flows[flow.producer].append(index)
        return tuple(map(tuple, flows))

    @cached_property
    def consumed(self) -> tuple[tuple[int, ...], ...]:
        """The flows that each unit consumes."""
        flows: list[list[int]] = [[] for _ in self.units]
        for index, flow in enumerate(self.flows):
            for unit in flow.consumers:
                flows[unit].append(index)
        return tuple(map(tuple, flows))

    @cached_property
    def width(self) -> int:
        """The most flows that cross a boundary of the graph's own order."""
        change = np.zeros(self.count + 1, np.int64)
        for flow in self.flows:
            change[flow.producer + 1] += 1
            change[flow.consumers[-1] + 1] -= 1
        return int(change.cumsum().max())

    # Costs of units

    @cached_property
    def compute(self) -> Integers:
        """(2, units): the compute of each unit in a stage that is not the last, and in the last."""
        times = [
            [self.problem.compute_ns(unit, last=last) for unit in self.units]
            for last in (False, True)
        ]
        return _array(times)

    @cached_property
    def kind_compute(self) -> Integers:
        """(kinds, 2, units): the same on each of several kinds of devices, else no rows.

        `compute` is then the least of any kind.
        """
        kinds = len(self.problem.graphs)
        if kinds == 1:
            return np.zeros((0, 2, self.count), np.int64)
        times = np.zeros((kinds, 2, self.count), np.int64)
        for kind, last in product(range(kinds), (False, True)):
            times[kind, int(last)] = [
                self.problem.kind_compute_ns(unit, kind, last=last) for unit in self.units
            ]
        return times

    @cached_property
    def needed_compute(self) -> NDArray[np.float64]:
        """Per unit a lower bound of its and its predecessors' compute, not in the last stage."""
        return reachable_weight(range(self.count), self.before, self.compute[0])

    @cached_property
    def fed_compute(self) -> NDArray[np.float64]:
        """Per unit a lower bound of its and its successors' compute, in the last stage."""
        return reachable_weight(range(self.count - 1, -1, -1), self.after, self.compute[1])

    @cached_property
    def resident(self) -> Integers:
        """Per unit the bytes held for any number of microbatches; zeros without a memory cap."""
        memory = self.problem.memory
        return self._sum_over_nodes(lambda name: memory.resident[name] if memory else 0)

    @cached_property
    def saved(self) -> Integers:
        """Per unit the bytes held for each microbatch in flight; zeros without a memory cap."""
        memory = self.problem.memory
        return self._sum_over_nodes(lambda name: memory.saved[name] if memory else 0)

    @cached_property
    def freeable(self) -> Integers:
        """(classes, units): the bytes of each class of `MemoryConstraint.freeable`."""
        classes = self.problem.memory.freeable if self.problem.memory else ()
        rows = np.zeros((len(classes), self.count), np.int64)
        for row, freeable in zip(rows, classes, strict=True):
            row[:] = [sum(freeable.bytes.get(name, 0) for name in unit) for unit in self.units]
        return rows

    @cached_property
    def parameters(self) -> Integers:
        """Per unit the bytes of its parameters."""
        by_name = self.problem.graph.by_name
        return self._sum_over_nodes(lambda name: by_name[name].parameter_bytes)

    def _sum_over_nodes(self, value: Callable[[str], int]) -> Integers:
        return _array([sum(value(name) for name in unit) for unit in self.units])

    # Costs of flows

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The different hops between neighbouring stages, as far as transfers are charged."""
        hops = [self.problem.hop(stage) for stage in range(self.k - 1)]
        return tuple(dict.fromkeys(hop for hop in hops if hop is not None))

    @cached_property
    def crossing_kinds(self) -> tuple[CrossingKind, ...]:
        """All that is summed over the flows that cross a boundary."""
        memory = self.problem.memory
        has_buffers = memory is not None and memory.boundary_buffers is not None
        return (*self.hops, *(("arriving", "returning") if has_buffers else ()))

    def weights(self, kind: CrossingKind) -> Integers:
        """Return, per flow, the ns of its transfers over a hop, or the bytes of its buffers."""
        if kind not in self._weights:
            self._weights[kind] = _array([self._weight(flow, kind) for flow in self.flows])
        return self._weights[kind]

    @cached_property
    def _weights(self) -> dict[CrossingKind, Integers]:
        return {}

    def _weight(self, flow: Flow, kind: CrossingKind) -> int:
        if isinstance(kind, Hop):
            return flow.transfer_ns(kind)
        assert self.problem.memory is not None
        buffers = getattr(self.problem.memory.boundary_buffers, kind)
        return sum(buffers[name] for name in flow.names)

    # Pins

    @cached_property
    def pins(self) -> dict[int, int]:
        """The stage of each pinned unit."""
        return {self.position[unit[0]]: stage for unit, stage in self.problem.pins.items()}

    @cached_property
    def pin_windows(self) -> tuple[list[int], list[int]]:
        """Per unit the first and last stage that pins allow: its own, and those of its relatives.

        With b pinned to stage 1 of 3 in a → b → c, a may lie in 0 … 1 and c in 1 … 2.
        """
        low, high = [0] * self.count, [self.k - 1] * self.count
        for unit, stage in self.pins.items():
            low[unit] = high[unit] = stage
        # Units are in topological order: one pass each way is enough.
        for unit in range(self.count):
            low[unit] = max([low[unit], *(low[source] for source in self.before[unit])])
        for unit in reversed(range(self.count)):
            high[unit] = min([high[unit], *(high[target] for target in self.after[unit])])
        return low, high

    @cached_property
    def restricted(self) -> tuple[int, ...]:
        """The units that pins keep out of some stage."""
        low, high = self.pin_windows
        return tuple(unit for unit in range(self.count) if low[unit] > 0 or high[unit] < self.k - 1)

    def refuse_contradictions(self) -> None:
        """Raise InfeasibleError where a pin puts a unit after one that it feeds."""
        low, high = self.pin_windows
        for unit in range(self.count):
            if low[unit] > high[unit]:
                first, first_stage = self._strictest_pin(unit, self.before, max)
                then, then_stage = self._strictest_pin(unit, self.after, min)
                first_name, then_name = self.units[first][0], self.units[then][0]
                raise InfeasibleError(
                    f"pins (or the groups inputs and outputs) put {first_name} in stage "
                    f"{first_stage} and {then_name} in stage {then_stage}, but {then_name} comes "
                    f"after {first_name}; swap or drop one"
                )

    def _strictest_pin(
        self,
        unit: int,
        neighbours: Sequence[Sequence[int]],
        strictest: Callable[..., tuple[int, int]],
    ) -> tuple[int, int]:
        """Return the unit whose pin restricts `unit` most, of it and all that `neighbours` lead to.

        It comes with the stage that it is pinned to.
        """
        reached = [unit]
        seen = {unit}
        for current in reached:
            for neighbour in neighbours[current]:
                if neighbour not in seen:
                    seen.add(neighbour)
                    reached.append(neighbour)
        stage, at = strictest((self.pins[u], u) for u in reached if u in self.pins)
        return at, stage

    def assignment(self, stages: Iterable[int]) -> dict[str, int]:
        """Return the stage of each node, from that of each unit."""
        # Python's integers: the files of plans do not take NumPy's.
        by_unit = zip(self.units, stages, strict=True)
        return {name: int(stage) for unit, stage in by_unit for name in unit}


def _array(values: Sequence[int] | Sequence[Sequence[int]]) -> Integers:
    return np.array(values, dtype=np.int64)


def reachable_weight(
    order: range, sources: Sequence[Sequence[int]], weights: Integers
) -> NDArray[np.float64]:
    """Return, per unit, the weight of it and of all units that lead to it through `sources`.

    `order` visits sources first. Above `BITSET_UNITS_MAX` units sets would take too much memory;
    the weight of the heaviest path is returned instead, which is less or equal.
    """
    count = len(weights)
    if count > BITSET_UNITS_MAX:
        return _heaviest_path(order, sources, weights)
    # In the diamond a → b, c → d with 2, 3, 1 and 4 ns, d needs 10. The sum over its predecessors'
    # own sums would be 14, since a is in both; sets count it once. The heaviest path has 9.
    reached = np.zeros((count, -(-count // 8)), np.uint8)  # row u: the set of u as bits
    for unit in order:
        if sources[unit]:
            reached[unit] = np.bitwise_or.reduce(reached[list(sources[unit])], axis=0)
        reached[unit, unit // 8] |= 1 << unit % 8
    values, result = weights.astype(np.float64), np.zeros(count)
    for start in range(0, count, UNPACKED_ROWS):
        rows = slice(start, start + UNPACKED_ROWS)
        members = np.unpackbits(reached[rows], axis=1, count=count, bitorder="little")
        result[rows] = members @ values
    return result


def _heaviest_path(
    order: range, sources: Sequence[Sequence[int]], weights: Integers
) -> NDArray[np.float64]:
    heaviest = np.zeros(len(weights))
    for unit in order:
        before = max((heaviest[source] for source in sources[unit]), default=0)
        heaviest[unit] = weights[unit] + before
    return heaviest
