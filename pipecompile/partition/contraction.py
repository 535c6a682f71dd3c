"""Fewer units for large graphs: neighbours in the order are joined, so that some places to cut are given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

__all__ = ["contract"]

Unit = tuple[str, ...]


def contract(
    units: Sequence[Unit], weights: Sequence[int], limit: int, pins: Mapping[Unit, int]
) -> tuple[tuple[Unit, ...], dict[Unit, int]]:
    """At most `limit` units, joining the lightest pair of neighbours first, and their pins.

    A heuristic: the best cut may be one that was given up, but a pair is at most about twice as heavy as the mean
    of what is left. Units pinned to different stages stay apart.
    """
    members, weight = list(units), list(weights)
    stage = [pins.get(unit) for unit in units]
    right, left = list(range(1, len(units) + 1)), list(range(-1, len(units) - 1))
    heap = [(weight[i] + weight[i + 1], i, i + 1) for i in range(len(units) - 1)]
    heapify(heap)
    alive = len(units)
    while alive > limit and heap:
        total, a, b = heappop(heap)
        stale = not members[a] or right[a] != b or weight[a] + weight[b] != total
        if stale or (None not in (stage[a], stage[b]) and stage[a] != stage[b]):
            continue
        members[a], members[b], weight[a] = members[a] + members[b], (), total
        stage[a] = stage[b] if stage[a] is None else stage[a]
        right[a], alive = right[b], alive - 1
        for one, other in ((left[a], a), (a, right[a])):
            if one >= 0 and other < len(units):
                left[other] = one
                heappush(heap, (weight[one] + weight[other], one, other))
    kept = [i for i, unit in enumerate(members) if unit]
    return tuple(members[i] for i in kept), {members[i]: s for i in kept if (s := stage[i]) is not None}
