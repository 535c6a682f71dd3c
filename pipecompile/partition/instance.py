"""A problem in numbers: units, what they cost, and the tensors between them, as arrays that searches work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import Tensor
from pipecompile.ir.links import Hop
from pipecompile.partition.problem import Problem
from pipecompile.partition.units import Unit

__all__ = ["Flow", "Instance", "Integers", "Mask"]

Crossing = Hop | str
REACH_MAX = (
    16_384  # units up to which everything that a unit needs is added up, in units² / 8 bytes
)

Integers = NDArray[Any]  # int64, or Python integers where squares do not fit
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Flow:
    """The tensors from one unit to the same other ones: (bytes, gradient bytes) of each, and their producers."""

    producer: int
    consumers: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    names: tuple[str, ...]

    def transfer_ns(self, hop: Hop) -> int:
        """What the values and their gradients take."""
        return sum(hop.transfer_ns(value, gradient) for value, gradient in self.sizes)


@dataclass(frozen=True)
class Instance:
    """`problem` over `units`, which are its own or joined ones, in a topological order."""

    problem: Problem
    units: tuple[Unit, ...]

    @staticmethod
    def of(problem: Problem) -> Instance:
        """Over the problem's own units; InfeasibleError if its pins contradict the order of the graph."""
        instance = Instance(problem, problem.units)
        instance.refuse_contradictions()
        return instance

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

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """Tensors that go from unit to unit, those with the same ends together."""
        joined: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}
        for tensor in self.problem.graph.tensors:
            producer = self.position[tensor.producer]
            ends = {self.position[name] for name in tensor.consumers} - {producer}
            if ends:
                joined.setdefault((producer, tuple(sorted(ends))), []).append(tensor)
        return tuple(
            Flow(
                producer,
                ends,
                tuple((tensor.bytes, tensor.gradient_bytes) for tensor in tensors),
                tuple(tensor.producer for tensor in tensors),
            )
            for (producer, ends), tensors in joined.items()
        )

    @cached_property
    def ends(self) -> tuple[Integers, Integers, Integers]:
        """Producers of the flows; their consumers in one array; and where in it each flow's begin."""
        counts = [len(flow.consumers) for flow in self.flows]
        producers = self._array([flow.producer for flow in self.flows])
        consumers = self._array([unit for flow in self.flows for unit in flow.consumers])
        return producers, consumers, np.cumsum([0, *counts[:-1]], dtype=np.int64)[: len(counts)]

    def crosses(self, inside: Mask) -> Mask:
        """Per flow whether it crosses the ideal of the units `inside`."""
        producers, consumers, starts = self.ends
        if not len(producers):
            return np.zeros(0, np.bool_)
        found: Mask = inside[producers] & ~np.logical_and.reduceat(inside[consumers], starts)
        return found

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The units that feed each unit."""
        feeds: list[set[int]] = [set() for _ in self.units]
        for flow in self.flows:
            for consumer in flow.consumers:
                feeds[consumer].add(flow.producer)
        for first, then in self.problem.precedence:
            if self.position[first] != self.position[then]:
                feeds[self.position[then]].add(self.position[first])
        return tuple(tuple(sorted(feed)) for feed in feeds)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The units that each unit feeds."""
        feeds: list[list[int]] = [[] for _ in self.units]
        for consumer, sources in enumerate(self.before):
            for source in sources:
                feeds[source].append(consumer)
        return tuple(map(tuple, feeds))

    @cached_property
    def compute(self) -> Integers:
        """Per unit its time: row 0 in a stage that is not the last, row 1 in the last."""
        problem = self.problem
        return self._array(
            [[problem.compute_ns(u, last=last) for u in self.units] for last in (False, True)]
        )

    @cached_property
    def produced(self) -> tuple[tuple[int, ...], ...]:
        """The flows that each unit produces."""
        found: list[list[int]] = [[] for _ in self.units]
        for index, flow in enumerate(self.flows):
            found[flow.producer].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def consumed(self) -> tuple[tuple[int, ...], ...]:
        """The flows that each unit consumes."""
        found: list[list[int]] = [[] for _ in self.units]
        for index, flow in enumerate(self.flows):
            for unit in flow.consumers:
                found[unit].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The different hops between stages that follow each other, as far as they are charged."""
        found = [self.problem.hop(stage) for stage in range(self.k - 1)]
        return tuple(dict.fromkeys(hop for hop in found if hop is not None))

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """What is added up over the flows that cross a boundary: the times of all hops, and bytes of buffers."""
        floor = self.problem.memory.floor if self.problem.memory else None
        return (*self.hops, *(("arriving", "returning") if floor else ()))

    def weights(self, crossing: Crossing) -> Integers:
        """Per flow the time of its transfers over a hop, or the bytes of its buffers."""
        if crossing not in self._weights:
            self._weights[crossing] = self._array(
                [self._weight(flow, crossing) for flow in self.flows]
            )
        return self._weights[crossing]

    @cached_property
    def _weights(self) -> dict[Crossing, Integers]:
        return {}

    def _weight(self, flow: Flow, crossing: Crossing) -> int:
        if isinstance(crossing, Hop):
            return flow.transfer_ns(crossing)
        assert self.problem.memory is not None and self.problem.memory.floor is not None
        held = getattr(self.problem.memory.floor, crossing)
        return sum(held[name] for name in flow.names)

    @cached_property
    def resident(self) -> Integers:
        """Per unit the bytes that it holds whatever the microbatches; zeros without a memory cap."""
        return self._bytes(
            lambda name: self.problem.memory.resident[name] if self.problem.memory else 0
        )

    @cached_property
    def saved(self) -> Integers:
        """Per unit the bytes that it holds for each microbatch in flight; zeros without a memory cap."""
        return self._bytes(
            lambda name: self.problem.memory.saved[name] if self.problem.memory else 0
        )

    @cached_property
    def freeable(self) -> Integers:
        """Per class of `Memory.freeable` and unit the bytes; (0, units) without any."""
        classes = self.problem.memory.freeable if self.problem.memory else ()
        found = [
            [sum(each.bytes.get(name, 0) for name in unit) for unit in self.units]
            for each in classes
        ]
        return self._array(found).reshape(len(classes), self.count)

    @cached_property
    def parameters(self) -> Integers:
        """Per unit the bytes of its parameters."""
        return self._bytes(lambda name: self.problem.graph.by_name[name].parameter_bytes)

    def _bytes(self, of: Callable[[str], int]) -> Integers:
        return self._array([sum(of(name) for name in unit) for unit in self.units])

    @staticmethod
    def _array(values: Sequence[int] | Sequence[Sequence[int]]) -> Integers:
        return np.array(values, dtype=np.int64)

    @cached_property
    def windows(self) -> tuple[list[int], list[int]]:
        """Per unit the first and the last stage that its pin, and those of units it needs or feeds, leave it."""
        low, high = [0] * self.count, [self.k - 1] * self.count
        for unit, stage in self.pins.items():
            low[unit] = high[unit] = stage
        for unit in range(self.count):
            low[unit] = max([low[unit], *(low[u] for u in self.before[unit])])
        for unit in reversed(range(self.count)):
            high[unit] = min([high[unit], *(high[u] for u in self.after[unit])])
        return low, high

    @cached_property
    def width(self) -> int:
        """How many flows cross a boundary of the graph's own order, at the most."""
        change = np.zeros(self.count + 1, np.int64)
        for flow in self.flows:
            change[flow.producer + 1] += 1
            change[flow.consumers[-1] + 1 :][:1] -= 1
        return int(change.cumsum().max())

    @cached_property
    def needed_compute(self) -> NDArray[np.float64]:
        """Per unit the compute of it and of all that it needs, in stages that are not the last."""
        return _reached(range(self.count), self.before, self.compute[0])

    @cached_property
    def fed_compute(self) -> NDArray[np.float64]:
        """Per unit the compute of it and of all that needs it, at the least."""
        return _reached(range(self.count - 1, -1, -1), self.after, self.compute[1])

    @cached_property
    def decided(self) -> tuple[int, ...]:
        """The units that pins keep out of some stage."""
        low, high = self.windows
        return tuple(unit for unit in range(self.count) if low[unit] > 0 or high[unit] < self.k - 1)

    @cached_property
    def pins(self) -> dict[int, int]:
        """The stage of each pinned unit."""
        return {self.position[unit[0]]: stage for unit, stage in self.problem.pins.items()}

    def refuse_contradictions(self) -> None:
        """InfeasibleError where a pin puts a unit after one that it feeds."""
        low, high = self.windows
        for unit in range(self.count):
            if low[unit] > high[unit]:
                first = self._pinned(unit, self.before, max)
                then = self._pinned(unit, self.after, min)
                (a, s), (b, t) = ((self.units[u][0], stage) for u, stage in (first, then))
                raise InfeasibleError(
                    f"pins (or the groups inputs and outputs) put {a} in stage {s} and {b} in stage {t}, "
                    f"but {b} comes after {a}; swap or drop one"
                )

    def _pinned(
        self, unit: int, towards: Sequence[Sequence[int]], worst: Callable[..., tuple[int, int]]
    ) -> tuple[int, int]:
        """The pin that restricts a unit most among those on one side of it, and the unit that has it."""
        seen, queue = {unit}, [unit]
        for found in queue:
            queue += [u for u in towards[found] if u not in seen and not seen.add(u)]  # type: ignore[func-returns-value]
        stage, at = worst((self.pins[u], u) for u in queue if u in self.pins)
        return at, stage

    def assignment(self, stages: Iterable[int]) -> dict[str, int]:
        """The stage of each node, from that of each unit."""
        return {
            name: int(stage)
            for unit, stage in zip(self.units, stages, strict=True)
            for name in unit
        }


def _reached(
    order: range, sources: Sequence[Sequence[int]], weights: Integers
) -> NDArray[np.float64]:
    """Per unit the weight of all units that lead to it, itself included; of the heaviest path where units are many."""
    count = len(weights)
    if count > REACH_MAX:
        heaviest = np.zeros(count)
        for unit in order:
            heaviest[unit] = weights[unit] + max(
                (heaviest[source] for source in sources[unit]), default=0
            )
        return heaviest
    bits = np.zeros((count, -(-count // 8)), np.uint8)
    for unit in order:
        if sources[unit]:
            bits[unit] = np.bitwise_or.reduce(bits[list(sources[unit])], axis=0)
        bits[unit, unit // 8] |= 1 << unit % 8
    values, found = weights.astype(np.float64), np.zeros(count)
    for start in range(0, count, 1024):
        members = np.unpackbits(bits[start : start + 1024], axis=1, count=count, bitorder="little")
        found[start : start + 1024] = members @ values
    return found
