"""Hill climbing over boundaries and single units, where no dynamic program is possible.

That is so for the simulated step, and for loads of ranks that run several stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.orders import topological_order
from pipecompile.partition.unit_graph import UnitGraph

__all__ = ["climb"]

Stages = tuple[int, ...]  # the stage of each unit


def climb(
    unit_graph: UnitGraph,
    stages: Sequence[int],
    value: Callable[[Stages], Any],
    evaluations: int,
) -> Stages:
    """Return the stages after moves that lower `value`, with about so many evaluations of it.

    `value` is None for stages that are not allowed. Units are laid out in an order that has the
    stages as intervals. Boundaries move in it, alone or with all after them, by steps that halve
    when none helps; at a step of one, single units move too:

        0 0 0 0 | 1 1 | 2 2 2 2    step 2
        0 0 | 1 1 1 1 | 2 2 2 2    the first boundary alone
        0 0 | 1 1 | 2 2 2 2 2 2    the first boundary with all after it
    """
    best = tuple(int(stage) for stage in stages)
    least = value(best)
    order, starts = _layout(unit_graph, best)
    # The first step is half a stage of mean size.
    step, left = max(1, unit_graph.count // (2 * unit_graph.k)), evaluations
    while step and left > 0:
        has_improved = False
        candidates = list(_boundary_moves(order, starts, step))
        if step == 1:
            candidates += _unit_moves(unit_graph, best)
        for candidate in candidates:
            candidate_value = value(candidate)
            left -= 1
            if candidate_value is not None and (least is None or candidate_value < least):
                best, least, has_improved = candidate, candidate_value, True
            if left <= 0:
                break
        if not has_improved:
            step //= 2
        order, starts = _layout(unit_graph, best)
    return best


def _layout(unit_graph: UnitGraph, stages: Stages) -> tuple[Rows, Rows]:
    """Return an order with these stages as intervals, and where stages 1 … k − 1 start in it."""
    order = np.array(topological_order(unit_graph, lambda unit: (stages[unit], unit)), np.intp)
    return order, np.searchsorted(np.asarray(stages)[order], np.arange(1, unit_graph.k))


def _unit_moves(unit_graph: UnitGraph, stages: Stages) -> Iterator[Stages]:
    """Yield the stages with each unit moved one stage later or earlier.

    A unit moves only as far as its predecessors and successors allow.
    """
    last = unit_graph.k - 1
    for unit, stage in enumerate(stages):
        latest = min((stages[after] for after in unit_graph.after[unit]), default=last)
        earliest = max((stages[before] for before in unit_graph.before[unit]), default=0)
        for moved in (stage + 1, stage - 1):
            if earliest <= moved <= latest:
                yield (*stages[:unit], moved, *stages[unit + 1 :])


def _boundary_moves(order: Rows, starts: Rows, step: int) -> Iterator[Stages]:
    """Yield the stages with each boundary moved a step either way, alone and with all after it.

    No stage becomes empty.
    """
    for index in range(len(starts)):
        # Of the last boundary both are the same move.
        for stop in dict.fromkeys((index + 1, len(starts))):
            for change in (-step, step):
                moved = starts.copy()
                moved[index:stop] += change
                if (np.diff(moved, prepend=0, append=len(order)) > 0).all():
                    yield _stages_from(order, moved)


def _stages_from(order: Rows, starts: Rows) -> Stages:
    stages = np.zeros(len(order), np.intp)
    stages[order] = np.searchsorted(starts, np.arange(len(order)), side="right")
    return tuple(stages.tolist())
