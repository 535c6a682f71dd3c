"""Hill climbing over the boundaries of one order, for objectives that no dynamic program decomposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipecompile.partition.instance import Instance
from pipecompile.partition.orders import topological

__all__ = ["climb"]


def climb(
    instance: Instance, stages: Sequence[int], value: Callable[[tuple[int, ...]], Any], evaluations: int
) -> tuple[int, ...]:
    """Moves boundaries of an order that has these stages as intervals, as long as `value` falls.

    `value` is None for what is not allowed. Boundaries move alone or a run of them together, by steps that halve
    each time that nothing helps.
    """
    order = np.array(topological(instance, lambda unit: (stages[unit], unit)), np.intp)
    best = tuple(int(stage) for stage in stages)
    lowest, cuts = value(best), np.searchsorted(np.asarray(best)[order], np.arange(1, instance.k))
    step, left = max(1, instance.count // (2 * instance.k)), evaluations
    while step and left > 0:
        improved = False
        for moved in _moves(cuts, step, instance.count):
            candidate = _stages(order, moved)
            found = value(candidate)
            left -= 1
            if found is not None and (lowest is None or found < lowest):
                best, lowest, cuts, improved = candidate, found, moved, True
            if left <= 0:
                break
        step = step if improved else step // 2
    return best


def _moves(cuts: np.ndarray, step: int, count: int) -> list[np.ndarray]:
    """Each boundary, and each boundary with all after it, moved by a step either way; stages stay non-empty."""
    found = []
    for index in range(len(cuts)):
        for stop in dict.fromkeys((index + 1, len(cuts))):
            for by in (-step, step):
                moved = cuts.copy()
                moved[index:stop] += by
                if (np.diff(moved, prepend=0, append=count) > 0).all():
                    found.append(moved)
    return found


def _stages(order: np.ndarray, cuts: np.ndarray) -> tuple[int, ...]:
    stages = np.zeros(len(order), np.intp)
    stages[order] = np.searchsorted(cuts, np.arange(len(order)), side="right")
    return tuple(stages.tolist())
