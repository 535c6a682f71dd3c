"""Topological orders of the units, which `prefix_cuts` cuts into intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from pipecompile.partition.unit_graph import UnitGraph

__all__ = ["shuffled_order", "topological_order", "topological_orders"]

DEPTH_NOISE = (1.0, 4.0, 16.0)  # how far shuffles of the order of depth stray from it, in levels


def topological_orders(unit_graph: UnitGraph) -> Iterator[list[int]]:
    """Yield up to eight different orders, the graph's own first.

    Those by depth mix parallel branches, those depth first finish one branch before the next.
    """
    own = range(unit_graph.count)
    backwards = list(reversed(own))
    before, after = unit_graph.before, unit_graph.after
    depth, height = _path_lengths(own, before), _path_lengths(backwards, after)
    deepest = max(depth, default=0)
    low, high = unit_graph.pin_windows
    seen = set()
    for order in (
        list(own),
        topological_order(unit_graph, lambda unit: (depth[unit], unit)),  # as soon as possible
        topological_order(unit_graph, lambda unit: (deepest - height[unit], unit)),  # as late
        topological_order(unit_graph, lambda unit: (-height[unit], unit)),  # longest rest first
        _depth_first(unit_graph, before, own),
        _depth_first(unit_graph, before, backwards),
        list(reversed(_depth_first(unit_graph, after, backwards))),
        list(reversed(_depth_first(unit_graph, after, own))),
    ):
        if unit_graph.restricted:
            # Units that pins put early come early. The order stays topological, since the windows
            # of pins never decrease along an edge.
            order = sorted(order, key=lambda unit: low[unit] + high[unit])
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield order


def shuffled_order(
    unit_graph: UnitGraph, stages: Sequence[int], random: np.random.Generator
) -> list[int]:
    """Return an order that has the stages of a cut as intervals and is random within them.

    Half of them are uniformly random, half are near the order of depth.
    """
    noise = random.random(unit_graph.count)
    if random.integers(2):
        return topological_order(unit_graph, lambda unit: (stages[unit], noise[unit], unit))
    depth = _path_lengths(range(unit_graph.count), unit_graph.before)
    scale = float(random.choice(DEPTH_NOISE))
    return topological_order(
        unit_graph, lambda unit: (stages[unit], depth[unit] + scale * noise[unit], unit)
    )


def topological_order(unit_graph: UnitGraph, key: Callable[[int], Any]) -> list[int]:
    """Return the order in which, of the ready units, the one with the least key comes next."""
    missing = [len(sources) for sources in unit_graph.before]
    ready = [(key(unit), unit) for unit in range(unit_graph.count) if not missing[unit]]
    heapify(ready)
    order = []
    while ready:
        _, unit = heappop(ready)
        order.append(unit)
        for after in unit_graph.after[unit]:
            missing[after] -= 1
            if not missing[after]:
                heappush(ready, (key(after), after))
    return order


def _path_lengths(order: Iterable[int], sources: Sequence[Sequence[int]]) -> list[int]:
    """Return, per unit, the edges of the longest path that leads to it.

    `order` visits sources first.
    """
    length = [0] * len(sources)
    for unit in order:
        length[unit] = max((length[source] + 1 for source in sources[unit]), default=0)
    return length


def _depth_first(
    unit_graph: UnitGraph, sources: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[int]:
    """Return an order with every unit after its sources.

    All units that one of `ends` needs come before the next end.

    A recursive search with its stack in a list, since graphs are deeper than Python's stack.
    """
    done, order = [False] * unit_graph.count, []
    for end in ends:
        stack = [(end, iter(sources[end]))] if not done[end] else []
        while stack:
            unit, remaining = stack[-1]
            source = next((s for s in remaining if not done[s]), None)
            if source is not None:
                stack.append((source, iter(sources[source])))
                continue
            stack.pop()
            if not done[unit]:
                done[unit] = True
                order.append(unit)
    return order
