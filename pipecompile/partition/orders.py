"""Topological orders of the units: a cut is found in one of them, so which ones are tried matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from pipecompile.partition.instance import Instance

__all__ = ["orders", "reordered"]


def orders(instance: Instance) -> Iterator[list[int]]:
    """The graph's own order first, then others that differ from it in kind, each once."""
    seen = set()
    low, high = instance.windows
    own = range(instance.count)
    depth, height = _levels(own, instance.before), _levels(reversed(own), instance.after)
    deepest = max(depth, default=0)
    for order in (
        list(own),
        topological(instance, lambda unit: (depth[unit], unit)),  # as soon as possible
        topological(instance, lambda unit: (deepest - height[unit], unit)),  # as late as possible
        topological(instance, lambda unit: (-height[unit], unit)),
        _depth_first(instance, instance.before, own),
        _depth_first(instance, instance.before, list(reversed(own))),
        list(reversed(_depth_first(instance, instance.after, list(reversed(own))))),
        list(reversed(_depth_first(instance, instance.after, own))),
    ):
        if (
            instance.decided
        ):  # what pins put early comes early: stages of what needs and feeds it never decrease
            order = sorted(order, key=lambda unit: low[unit] + high[unit])
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield order


def reordered(instance: Instance, stages: Sequence[int], random: np.random.Generator) -> list[int]:
    """An order that keeps the stages of a cut apart and is otherwise random, or near the order of depth."""
    noise = random.random(instance.count)
    if random.integers(2):
        return topological(instance, lambda unit: (stages[unit], noise[unit], unit))
    depth = _levels(range(instance.count), instance.before)
    scale = float(random.choice([1.0, 4.0, 16.0]))
    return topological(
        instance, lambda unit: (stages[unit], depth[unit] + scale * noise[unit], unit)
    )


def topological(instance: Instance, key: Callable[[int], Any]) -> list[int]:
    """Of the units that are ready the one of least key comes next."""
    missing = [len(sources) for sources in instance.before]
    ready = [(key(unit), unit) for unit in range(instance.count) if not missing[unit]]
    heapify(ready)
    order = []
    while ready:
        _, unit = heappop(ready)
        order.append(unit)
        for after in instance.after[unit]:
            missing[after] -= 1
            if not missing[after]:
                heappush(ready, (key(after), after))
    return order


def _levels(order: Sequence[int] | Iterator[int], sources: Sequence[Sequence[int]]) -> list[int]:
    """The length of the longest path that leads to each unit."""
    level = [0] * len(sources)
    for unit in order:
        level[unit] = max((level[source] + 1 for source in sources[unit]), default=0)
    return level


def _depth_first(
    instance: Instance, sources: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[int]:
    """Every unit after its sources, one branch finished before the next begins."""
    done, order = [False] * instance.count, []
    for end in ends:
        stack = [(end, iter(sources[end]))] if not done[end] else []
        while stack:
            unit, rest = stack[-1]
            source = next((s for s in rest if not done[s]), None)
            if source is None:
                stack.pop()
                if not done[unit]:
                    done[unit] = True
                    order.append(unit)
            else:
                stack.append((source, iter(sources[source])))
    return order
