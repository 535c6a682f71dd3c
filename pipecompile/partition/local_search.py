"""Hill climbing over boundaries and single units, for objectives that no dynamic program decomposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.instance import Instance
from pipecompile.partition.orders import topological

__all__ = ["climb"]


def climb(
    instance: Instance,
    stages: Sequence[int],
    value: Callable[[tuple[int, ...]], Any],
    evaluations: int,
) -> tuple[int, ...]:
    """Moves boundaries of an order that has these stages as intervals, as long as `value` falls.

    `value` is None for what is not allowed. Boundaries move alone or a run of them together, by steps that halve
    each time that nothing helps; at a step of one, single units move too.
    """
    best = tuple(int(stage) for stage in stages)
    lowest, (order, cuts) = value(best), _laid_out(instance, best)
    step, left = max(1, instance.count // (2 * instance.k)), evaluations
    while step and left > 0:
        improved = False
        for candidate in (
            *_moves(order, cuts, step),
            *(_shifts(instance, best) if step == 1 else ()),
        ):
            found = value(candidate)
            left -= 1
            if found is not None and (lowest is None or found < lowest):
                best, lowest, improved = candidate, found, True
            if left <= 0:
                break
        step = step if improved else step // 2
        order, cuts = _laid_out(instance, best)
    return best


def _laid_out(instance: Instance, stages: tuple[int, ...]) -> tuple[Rows, Rows]:
    """An order that has these stages as intervals, and where they begin."""
    order = np.array(topological(instance, lambda unit: (stages[unit], unit)), np.intp)
    return order, np.searchsorted(np.asarray(stages)[order], np.arange(1, instance.k))


def _shifts(instance: Instance, stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Each unit one stage later or earlier, where what it feeds and needs lets it."""
    for unit, stage in enumerate(stages):
        later = min((stages[after] for after in instance.after[unit]), default=instance.k - 1)
        earlier = max((stages[before] for before in instance.before[unit]), default=0)
        for moved in (stage + 1, stage - 1):
            if earlier <= moved <= later:
                yield (*stages[:unit], moved, *stages[unit + 1 :])


def _moves(order: Rows, cuts: Rows, step: int) -> Iterator[tuple[int, ...]]:
    """Each boundary, and each boundary with all after it, moved by a step either way; stages stay non-empty."""
    for index in range(len(cuts)):
        for stop in dict.fromkeys((index + 1, len(cuts))):
            for by in (-step, step):
                moved = cuts.copy()
                moved[index:stop] += by
                if (np.diff(moved, prepend=0, append=len(order)) > 0).all():
                    yield _stages(order, moved)


def _stages(order: Rows, cuts: Rows) -> tuple[int, ...]:
    stages = np.zeros(len(order), np.intp)
    stages[order] = np.searchsorted(cuts, np.arange(len(order)), side="right")
    return tuple(stages.tolist())
