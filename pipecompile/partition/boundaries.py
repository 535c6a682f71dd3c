"""Families of boundaries: each is the set of units that run before it, closed under what they need (an ideal).

A cut is a chain ∅ ⊂ I₁ ⊂ … ⊂ I_k of ideals, and a stage is the difference of two. Its compute, its memory and what
`relay` charges are sums over ideals, so a family carries them as one number per member. All prefixes of one order
are a family; all ideals of the graph are the family of every cut there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.links import Hop
from pipecompile.partition.instance import Crossing, Instance, Integers, Mask

__all__ = ["Boundaries", "Ideals", "Listed", "Prefixes", "Rows", "enumerate_ideals"]

Rows = NDArray[np.intp]
Bits = NDArray[np.uint64]


@dataclass(frozen=True)
class Sums:
    """What the units of each member of a family add up to, and by kind what crosses it."""

    compute: Integers  # (2, members): in stages that are not the last, and in the last
    resident: Integers
    saved: Integers
    freeable: Integers  # (classes, members)
    parameters: Integers
    crossing: Mapping[Crossing, Integers]

    def each(self, change: Callable[[Integers], Integers]) -> Sums:
        """These with each array changed."""
        crossing = {kind: change(values) for kind, values in self.crossing.items()}
        return Sums(
            change(self.compute),
            change(self.resident),
            change(self.saved),
            change(self.freeable),
            change(self.parameters),
            crossing,
        )

    def with_those_of(self, others: Sequence[Sums]) -> Sums:
        """These and then those of others."""
        return Sums(
            np.concatenate([self.compute, *(o.compute for o in others)], axis=1),
            np.concatenate([self.resident, *(o.resident for o in others)]),
            np.concatenate([self.saved, *(o.saved for o in others)]),
            np.concatenate([self.freeable, *(o.freeable for o in others)], axis=1),
            np.concatenate([self.parameters, *(o.parameters for o in others)]),
            {
                kind: np.concatenate([values, *(o.crossing[kind] for o in others)])
                for kind, values in self.crossing.items()
            },
        )


class Boundaries(ABC):
    """A family of ideals, by row; row numbers ascend with the amount of compute."""

    instance: Instance
    sums: Sums

    def __len__(self) -> int:
        """How many ideals."""
        return len(self.sums.resident)

    @abstractmethod
    def inside(self, a: Rows, b: Rows) -> Mask:
        """Whether ideal a lies strictly in ideal b: (len(a), len(b))."""

    @abstractmethod
    def states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """Per ideal and flow: 0 where it does not cross, else 1 + the number of its consumers inside."""

    @abstractmethod
    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """The flows that may cross both an ideal of a and one of b."""

    @abstractmethod
    def contains(self, row: int) -> Mask:
        """Per unit whether it is in the ideal."""

    @abstractmethod
    def holds(self, unit: int) -> Mask:
        """Per ideal whether it has the unit."""

    def crossing(self, hop: Hop | None) -> Integers:
        """Per ideal the time of all transfers over a hop, values and gradients."""
        return np.zeros(len(self), np.int64) if hop is None else self.sums.crossing[hop]

    def passing(self, a: Rows, b: Rows, hop: Hop | None) -> Integers:
        """What `endpoint` does not charge to the stage between a and b, of what `relay` does.

        A flow that crosses both ideals passes the stage by: it is not sent on from here, and not received either
        unless a consumer lies in the stage, in which case b has more of its consumers than a.
        """
        flows = self.crossing_flows(a, b)
        if hop is None or not flows:
            return np.zeros((len(a), len(b)), np.int64)
        weights = self.instance.weights(hop)[list(flows)]
        # Products of floating point matrices are fast, and exact while sums stay below 2^53.
        kind = np.float64 if 2 * int(weights.sum()) < 2**53 else np.int64
        left, right = self.states(a, flows), self.states(b, flows)
        total = ((left > 0) * weights).astype(kind) @ (right > 0).T.astype(kind)
        for state in range(1, int(max(left.max(), right.max())) + 1):
            total += ((left == state) * weights).astype(kind) @ (right == state).T.astype(kind)
        return total.astype(np.int64)


class Prefixes(Boundaries):
    """The prefixes of a topological order of the units: row i has the first i."""

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        self.instance, self.order = instance, np.asarray(order, np.intp)
        self.place = np.empty(instance.count, np.intp)
        self.place[self.order] = np.arange(instance.count)
        self.sums = Sums(
            compute=_running(instance.compute[:, self.order]),
            resident=_running(instance.resident[self.order]),
            saved=_running(instance.saved[self.order]),
            freeable=_running(instance.freeable[:, self.order]),
            parameters=_running(instance.parameters[self.order]),
            crossing={
                crossing: self._crossing(instance.weights(crossing))
                for crossing in instance.crossings
            },
        )

    @cached_property
    def spans(self) -> tuple[Integers, Integers]:
        """Per flow the places of its producer and of its last consumer."""
        producers, consumers, starts = self.instance.ends
        last = (
            np.maximum.reduceat(self.place[consumers], starts)
            if len(starts)
            else np.zeros(0, np.intp)
        )
        return self.place[producers], last

    def _crossing(self, weights: Integers) -> Integers:
        change = np.zeros(self.instance.count + 1, np.int64)
        np.add.at(change, self.spans[0] + 1, weights)
        np.subtract.at(change, self.spans[1] + 1, weights)
        return change.cumsum()

    def inside(self, a: Rows, b: Rows) -> Mask:
        """See `Boundaries.inside`."""
        found: Mask = a[:, None] < b[None, :]
        return found

    def states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """See `Boundaries.states`."""
        result = np.zeros((len(rows), len(flows)), np.int64)
        for column, index in enumerate(flows):
            flow = self.instance.flows[index]
            uses = np.sort(self.place[list(flow.consumers)])
            crosses = (self.place[flow.producer] < rows) & (rows <= uses[-1])
            result[:, column] = crosses * (1 + np.searchsorted(uses, rows))
        return result

    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """See `Boundaries.crossing_flows`."""
        first, last = self.spans
        found: list[int] = np.flatnonzero((first < a.max()) & (last >= b.min())).tolist()
        return found

    def contains(self, row: int) -> Mask:
        """See `Boundaries.contains`."""
        found: Mask = self.place < row
        return found

    def holds(self, unit: int) -> Mask:
        """See `Boundaries.holds`."""
        found: Mask = np.arange(len(self)) > self.place[unit]
        return found


class Ideals(Boundaries):
    """Ideals from several lists, as rows of bits; `origin` says which list each is from. One may be there twice."""

    def __init__(self, instance: Instance, lists: Sequence[Listed]) -> None:
        sums = lists[0].sums.with_those_of([listed.sums for listed in lists[1:]])
        origin = np.repeat(np.arange(len(lists)), [len(listed.bits) for listed in lists])
        order = np.argsort(sums.compute[0], kind="stable")
        self.instance, self.origin = instance, origin[order]
        self.bits = np.concatenate([listed.bits for listed in lists])[order]
        self.sums = sums.each(lambda values: values[..., order])

    def inside(self, a: Rows, b: Rows) -> Mask:
        """See `Boundaries.inside`."""
        left, right = self.bits[a], self.bits[b]
        # Words in which every b has all that any a has need no comparison: most of them, if a and b are near.
        differ = np.flatnonzero(
            np.bitwise_or.reduce(left, axis=0) & ~np.bitwise_and.reduce(right, axis=0)
        )
        found = np.ones((len(a), len(b)), np.bool_)
        for word in differ:
            found &= (left[:, word, None] & ~right[None, :, word]) == 0
        return found & (self.sizes[a][:, None] < self.sizes[b][None, :])

    @cached_property
    def sizes(self) -> Integers:
        """How many units each ideal has: joined families may hold one twice."""
        result: Integers = np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)
        return result

    def states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """See `Boundaries.states`."""
        bits, result = self.bits[rows], np.zeros((len(rows), len(flows)), np.int64)
        for column, index in enumerate(flows):
            flow = self.instance.flows[index]
            uses = sum(_has(bits, unit).astype(np.int64) for unit in flow.consumers)
            result[:, column] = (_has(bits, flow.producer) & (uses < len(flow.consumers))) * (
                1 + uses
            )
        return result

    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """See `Boundaries.crossing_flows`."""
        in_some_a = np.bitwise_or.reduce(self.bits[a], axis=0)
        in_all_b = np.bitwise_and.reduce(self.bits[b], axis=0)
        return [
            index
            for index, flow in enumerate(self.instance.flows)
            if _bit(in_some_a, flow.producer)
            and not all(_bit(in_all_b, unit) for unit in flow.consumers)
        ]

    def contains(self, row: int) -> Mask:
        """See `Boundaries.contains`."""
        members = np.unpackbits(self.bits[row].astype("<u8").view(np.uint8), bitorder="little")
        return members[: self.instance.count].astype(np.bool_)

    def holds(self, unit: int) -> Mask:
        """See `Boundaries.holds`."""
        return _has(self.bits, unit)


@dataclass(frozen=True)
class Listed:
    """Ideals as rows of bits, and what they add up to."""

    bits: Bits
    sums: Sums


def enumerate_ideals(instance: Instance, below: Rows, free: Rows, limit: int) -> Listed | None:
    """All ideals that have the units `below` and otherwise only `free` ones; None if there are more than `limit`.

    Units are added in topological order: the ideals with a unit are those so far that hold all it needs, plus it.
    So no ideal is made twice, and its sums follow from those of the ideal it came from.
    """
    bits = np.zeros((1024, -(-instance.count // 64)), np.uint64)
    np.bitwise_or.at(bits[0], below // 64, np.uint64(1) << (below % 64).astype(np.uint64))
    count, births = 1, list[tuple[int, Rows]]()
    for unit in np.sort(free).tolist():
        parents = np.flatnonzero(_has_all(bits[:count], instance.before[unit]))
        total = count + len(parents)
        if total > limit:
            return None
        if total > len(bits):
            bits = np.concatenate(
                [bits[:count], np.zeros((2 * total - count, bits.shape[1]), np.uint64)]
            )
        bits[count:total] = bits[parents]
        bits[count:total, unit // 64] |= _flag(unit)
        births.append((unit, parents))
        count = total
    return Listed(bits[:count], _sums(instance, bits[:count], below, births))


def _sums(instance: Instance, bits: Bits, below: Rows, births: Sequence[tuple[int, Rows]]) -> Sums:
    """Each ideal's sums from those of its parent."""
    held = (
        instance.compute,
        instance.resident,
        instance.saved,
        instance.freeable,
        instance.parameters,
    )
    compute, resident, saved, freeable, parameters = (
        _inherited(values, values[..., below].sum(axis=-1), births, len(bits)) for values in held
    )
    inside = np.zeros(instance.count, np.bool_)
    inside[below] = True
    crosses = instance.crosses(inside)
    completed = list(_completed(instance, bits, births))
    crossing = {}
    for key in instance.crossings:
        weights, values = instance.weights(key), np.zeros(len(bits), np.int64)
        values[0], start = weights[crosses].sum(), 1
        for (unit, parents), done in zip(births, completed, strict=True):
            new = values[parents] + weights[list(instance.produced[unit])].sum()
            for flow, complete in done:
                new -= complete * weights[flow]
            values[start : start + len(parents)] = new
            start += len(parents)
        crossing[key] = values
    return Sums(compute, resident, saved, freeable, parameters, crossing)


def _inherited(
    values: Integers, first: Integers, births: Sequence[tuple[int, Rows]], count: int
) -> Integers:
    result = np.zeros((*values.shape[:-1], count), np.int64)
    result[..., 0], start = first, 1
    for unit, parents in births:
        result[..., start : start + len(parents)] = result[..., parents] + values[..., unit, None]
        start += len(parents)
    return result


def _completed(
    instance: Instance, bits: Bits, births: Sequence[tuple[int, Rows]]
) -> Iterator[list[tuple[int, Mask]]]:
    """Per unit that was added: the flows that it consumes, and in which new ideals it is the last to do so."""
    for unit, parents in births:
        others = [
            (flow, [u for u in instance.flows[flow].consumers if u != unit])
            for flow in instance.consumed[unit]
        ]
        yield [(flow, _has_all(bits[parents], units)) for flow, units in others]


def _running(values: Integers) -> Integers:
    """Sums of prefixes along the last axis, from the empty one on."""
    start = np.zeros((*values.shape[:-1], 1), values.dtype)
    result: Integers = np.concatenate([start, values.cumsum(axis=-1)], axis=-1)
    return result


def _flag(unit: int) -> np.uint64:
    return np.uint64(1 << unit % 64)


def _bit(bits: Bits, unit: int) -> bool:
    return bool(bits[unit // 64] & _flag(unit))


def _has_all(bits: Bits, units: Sequence[int]) -> Mask:
    """Per row whether it has all these units, word by word."""
    needed: dict[int, int] = {}
    for unit in units:
        needed[unit // 64] = needed.get(unit // 64, 0) | 1 << unit % 64
    found = np.ones(len(bits), np.bool_)
    for word, flags in needed.items():
        found &= bits[:, word] & np.uint64(flags) == flags
    return found


def _has(bits: Bits, unit: int) -> Mask:
    found: Mask = bits[:, unit // 64] & _flag(unit) != 0
    return found
