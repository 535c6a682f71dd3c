"""Lists of ideals as rows of bits: their enumeration, and the family of boundaries that they form.

Tarnawski et al., *Efficient algorithms for device placement of DNN graph operators*, NeurIPS 2020,
run the dynamic program over all ideals of a graph; `lattice` decides which ones are enumerated
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipecompile.partition.boundaries import Boundaries, BoundarySums, Rows
from pipecompile.partition.unit_graph import CrossingKind, Integers, Mask, UnitGraph

__all__ = ["IdealList", "Ideals", "enumerate_ideals"]

Bits = NDArray[
    np.uint64
]  # (ideals, words): bit u % 64 of word u // 64 says whether unit u is in it
ROWS_AT_FIRST = 1024


@dataclass(frozen=True)
class IdealList:
    """Ideals as rows of bits, and their sums."""

    bits: Bits
    sums: BoundarySums


class Ideals(Boundaries):
    """The family of the ideals of several lists; an ideal of two lists is in it twice.

    `origin` is the list of each ideal: list s has the ideals for boundary s.
    """

    def __init__(self, unit_graph: UnitGraph, lists: Sequence[IdealList]) -> None:
        sums = BoundarySums.concatenated([ideals.sums for ideals in lists])
        origin = np.repeat(np.arange(len(lists)), [len(ideals.bits) for ideals in lists])
        # `Boundaries` promises rows in ascending order of compute; a stable sort is deterministic.
        order = np.argsort(sums.compute[0], kind="stable")
        self.unit_graph, self.origin = unit_graph, origin[order]
        self.bits = np.concatenate([ideals.bits for ideals in lists])[order]
        self.sums = sums.mapped(lambda values: values[..., order])

    def is_subset(self, a: Rows, b: Rows) -> Mask:
        """Return for each pair whether ideal a is a strict subset of ideal b: (len(a), len(b))."""
        left, right = self.bits[a], self.bits[b]
        # Where every b has all that any a has, the word need not be compared pair by pair. That is
        # so for most words, since neighbouring boundaries lie near each other.
        in_some_a = np.bitwise_or.reduce(left, axis=0)
        in_all_b = np.bitwise_and.reduce(right, axis=0)
        result = np.ones((len(a), len(b)), np.bool_)
        for word in np.flatnonzero(in_some_a & ~in_all_b):
            result &= (left[:, word, None] & ~right[None, :, word]) == 0
        return result & (self.sizes[a][:, None] < self.sizes[b][None, :])

    @cached_property
    def sizes(self) -> Integers:
        """The number of units of each ideal, which tells equal ideals from strict subsets."""
        result: Integers = np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)
        return result

    def crossing_states(self, rows: Rows, flows: Sequence[int]) -> Integers:
        """Return the crossing state of each flow at each boundary, as (len(rows), len(flows))."""
        bits, states = self.bits[rows], np.zeros((len(rows), len(flows)), np.int64)
        for column, index in enumerate(flows):
            flow = self.unit_graph.flows[index]
            consumers = sum(_has_unit(bits, unit).astype(np.int64) for unit in flow.consumers)
            crosses = _has_unit(bits, flow.producer) & (consumers < len(flow.consumers))
            states[:, column] = crosses * (1 + consumers)
        return states

    def crossing_flows(self, a: Rows, b: Rows) -> Sequence[int]:
        """Return the flows that may cross the boundary of an ideal of a and that of one of b."""
        in_some_a = np.bitwise_or.reduce(self.bits[a], axis=0)
        in_all_b = np.bitwise_and.reduce(self.bits[b], axis=0)
        flows = []
        for index, flow in enumerate(self.unit_graph.flows):
            # A flow whose consumers all lie in every b crosses none of them.
            is_complete = all(_has_bit(in_all_b, unit) for unit in flow.consumers)
            if _has_bit(in_some_a, flow.producer) and not is_complete:
                flows.append(index)
        return flows

    def members(self, row: int) -> Mask:
        """Return, per unit, whether it is in the ideal."""
        # Little-endian words, so that bytes and bits are in the order of units on any machine.
        bits = np.unpackbits(self.bits[row].astype("<u8").view(np.uint8), bitorder="little")
        return bits[: self.unit_graph.count].astype(np.bool_)

    def has_unit(self, unit: int) -> Mask:
        """Return, per ideal, whether the unit is in it."""
        return _has_unit(self.bits, unit)


class _Addition(NamedTuple):
    """The ideals that arise by adding `unit` to each of the rows `parents`, in this order."""

    unit: int
    parents: Rows


def enumerate_ideals(
    unit_graph: UnitGraph, below: Rows, free: Rows, limit: int
) -> IdealList | None:
    """Return all ideals that have the units `below` and of the others only `free` ones.

    The result is None if there are more than `limit`. `below` must be an ideal itself.

    Units are added in topological order. The ideals whose last unit is u are those so far that hold
    all predecessors of u, with u added. So every ideal arises once, from one parent. The diamond
    a → b, c → d, nothing below and all free:

        row      0    1    2     3     4      5
        ideal    ∅    a    ab    ac    abc    abcd
        parent   -    0    1     1     2      4
        added         a    b     c     c      d

    The sums of an ideal follow from those of its parent in one step (see `_sums`).
    """
    bits = np.zeros((ROWS_AT_FIRST, -(-unit_graph.count // 64)), np.uint64)
    np.bitwise_or.at(bits[0], below // 64, np.uint64(1) << (below % 64).astype(np.uint64))
    count, additions = 1, list[_Addition]()
    for unit in np.sort(free).tolist():
        parents = np.flatnonzero(_has_all(bits[:count], unit_graph.before[unit]))
        total = count + len(parents)
        if total > limit:
            return None
        # Doubled, so that copying stays linear in the number of ideals.
        if total > len(bits):
            more = np.zeros((2 * total - count, bits.shape[1]), np.uint64)
            bits = np.concatenate([bits[:count], more])
        bits[count:total] = bits[parents]
        bits[count:total, unit // 64] |= _flag(unit)
        additions.append(_Addition(unit, parents))
        count = total
    return IdealList(bits[:count], _sums(unit_graph, bits[:count], below, additions))


def _sums(
    unit_graph: UnitGraph, bits: Bits, below: Rows, additions: Sequence[_Addition]
) -> BoundarySums:
    """Return the sums of each ideal, from those of its parent."""

    def over_units(values: Integers) -> Integers:
        result = np.zeros((*values.shape[:-1], len(bits)), np.int64)
        result[..., 0], start = values[..., below].sum(axis=-1), 1
        for unit, parents in additions:
            stop = start + len(parents)
            result[..., start:stop] = result[..., parents] + values[..., unit, None]
            start = stop
        return result

    return BoundarySums(
        compute=over_units(unit_graph.compute),
        kind_compute=over_units(unit_graph.kind_compute),
        resident=over_units(unit_graph.resident),
        saved=over_units(unit_graph.saved),
        freeable=over_units(unit_graph.freeable),
        parameters=over_units(unit_graph.parameters),
        crossing=_crossing_sums(unit_graph, bits, below, additions),
    )


def _crossing_sums(
    unit_graph: UnitGraph, bits: Bits, below: Rows, additions: Sequence[_Addition]
) -> dict[CrossingKind, Integers]:
    """Return, per ideal, the weight of the flows that cross its boundary.

    Adding a unit lets the flows that it produces cross, and ends those of which it is the last
    consumer. In the diamond with w(a) = 5 (consumers b, c), w(b) = 2 and w(c) = 3:

        ideal    ∅    a    ab       ac       abc              abcd
        sum      0    5    5 + 2    5 + 3    7 + 3 − 5 = 5    5 − 2 − 3 = 0
    """
    members = np.zeros(unit_graph.count, np.bool_)
    members[below] = True
    crosses_first = unit_graph.crosses(members)
    completions = list(_completions(unit_graph, bits, additions))
    sums: dict[CrossingKind, Integers] = {}
    for kind in unit_graph.crossing_kinds:
        weights, values = unit_graph.weights(kind), np.zeros(len(bits), np.int64)
        values[0], start = weights[crosses_first].sum(), 1
        for (unit, parents), completed in zip(additions, completions, strict=True):
            stop = start + len(parents)
            # Tensors between units have a consumer in a later unit, so all of these cross.
            added = values[parents] + weights[list(unit_graph.produced[unit])].sum()
            for flow, is_completed in completed:
                added -= is_completed * weights[flow]
            values[start:stop] = added
            start = stop
        sums[kind] = values
    return sums


def _completions(
    unit_graph: UnitGraph, bits: Bits, additions: Sequence[_Addition]
) -> Iterator[list[tuple[int, Mask]]]:
    """Yield, for each addition, the flows that its unit consumes.

    With each flow comes, per new ideal, whether the unit is the flow's last consumer.
    """
    for unit, parents in additions:
        completed = []
        for flow in unit_graph.consumed[unit]:
            others = [other for other in unit_graph.flows[flow].consumers if other != unit]
            completed.append((flow, _has_all(bits[parents], others)))
        yield completed


def _flag(unit: int) -> np.uint64:
    """Return the bit of a unit in its word."""
    return np.uint64(1 << unit % 64)


def _has_bit(row: Bits, unit: int) -> bool:
    """Return whether one row has a unit."""
    return bool(row[unit // 64] & _flag(unit))


def _has_unit(bits: Bits, unit: int) -> Mask:
    """Return, per row, whether it has a unit."""
    result: Mask = bits[:, unit // 64] & _flag(unit) != 0
    return result


def _has_all(bits: Bits, units: Sequence[int]) -> Mask:
    """Return, per row, whether it has all of `units`.

    Units of one word are compared together.
    """
    flags_of_word: dict[int, int] = {}
    for unit in units:
        flags_of_word[unit // 64] = flags_of_word.get(unit // 64, 0) | 1 << unit % 64
    result = np.ones(len(bits), np.bool_)
    for word, flags in flags_of_word.items():
        result &= bits[:, word] & np.uint64(flags) == flags
    return result
