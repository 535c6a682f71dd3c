"""Units that every other unit runs before or after, and what follows from them for memory.

All cuts have bottlenecks in the same order, with the same units between two of them:

    embed ─▶ qkv ─▶ add ─▶ mlp ─▶ add ─▶ head         bottlenecks: embed, both adds, head
        └──────────▶ ┘  └───────▶ ┘

So a stage that holds two of them holds all that lies between, whatever the order of the rest.
"""

from __future__ import annotations

import numpy as np

from pipecompile.partition.unit_graph import UnitGraph, reachable_weight

__all__ = ["bottlenecks", "proves_no_fit"]


def bottlenecks(unit_graph: UnitGraph) -> list[int]:
    """Return the units that each other unit leads to or follows from, in their order.

    Some may be left out of very large graphs.
    """
    count = unit_graph.count
    ones = np.ones(count, np.int64)
    needed = reachable_weight(range(count), unit_graph.before, ones)
    fed = reachable_weight(range(count - 1, -1, -1), unit_graph.after, ones)
    # Both count the unit itself.
    return [int(unit) for unit in np.flatnonzero(needed + fed == count + 1)]


def proves_no_fit(unit_graph: UnitGraph) -> bool:
    """Return whether no cut of any order fits, by what lies between bottlenecks alone.

    Each stage takes as many bottlenecks in a row as its cap allows, and what lies before its first
    one and behind its last one costs nothing. If some are left over no stages would do: a stage
    that takes fewer leaves more to the next ones. Stages that share ranks are not judged.
    """
    problem, memory = unit_graph.problem, unit_graph.problem.memory
    if memory is None or problem.ranks != problem.k:
        return False
    ends = np.array(bottlenecks(unit_graph), np.int64)
    optimizer = [sum(memory.optimizer.get(n, 0) for n in unit) for unit in unit_graph.units]
    resident = unit_graph.resident + np.array(optimizer, np.int64)
    taken = 0
    for in_flight, rank in zip(memory.in_flight, problem.stage_ranks, strict=True):
        if taken == len(ends):
            break
        held = np.cumsum([0, *(resident + in_flight * unit_graph.saved).tolist()])
        room = held[ends[taken]] + memory.caps[rank]
        taken = max(taken, int(np.searchsorted(held[ends + 1], room, side="right")))
    return taken < len(ends)
