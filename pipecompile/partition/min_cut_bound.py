"""A bound where transfers count: what must cross each boundary, by minimum cuts.

Under `relay` the loads sum to all compute and twice what crosses the boundaries. Windows say which units lie below a
boundary and which above in every cut within a limit; the least that crosses any ideal between the two is a minimum
cut (a tensor is one arc that all its consumers share; what a unit needs lies on its side), so no cut sends less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ortools.graph.python import max_flow

from pipecompile.partition.instance import Instance, Integers, Mask
from pipecompile.partition.windows import Limit, windows

__all__ = ["crossing_bound", "informed"]

FOREVER = 1 << 60  # a capacity that no cut pays
SOURCE, SINK = 0, 1
UNDECIDED_MAX = (
    1_000_000  # units on no side of a boundary yet, over all boundaries, for which cuts are found
)


def informed(instance: Instance, limit: Limit, rounds: int = 3) -> Limit:
    """The limit with what crosses each boundary at the least; the windows that it leaves make that more, and so on."""
    if not _is_sum(instance):
        return limit
    for _ in range(rounds):
        low, high = windows(instance, limit)
        if int(np.maximum(high - low, 0).sum()) > UNDECIDED_MAX:
            break
        found = tuple(_least_at(instance, boundary, low, high) for boundary in range(1, instance.k))
        if found == limit.crossing or (low > high).any():
            break
        limit = replace(limit, crossing=found)
    return limit


def _is_sum(instance: Instance) -> bool:
    """Whether the loads sum to all compute and twice what crosses."""
    problem = instance.problem
    alike = problem.ranks == instance.k and problem.speeds is None and problem.replica_ranks is None
    return problem.communication == "relay" and alike and bool(instance.hops)


def crossing_bound(instance: Instance, limit: Limit, known: int, tests: int) -> int:
    """No cut is worth less, if one within the limit exists; bisected in so many tests between a `known` bound and it.

    If every cut worth at most v is worth at least b, then no cut is worth less than b, or than v + 1 if b is above v.
    """
    variance = instance.problem.objective == "variance"
    high = limit.squares if variance else limit.most
    if high is None or not _is_sum(instance):
        return known
    for value in range(tests):
        guess = high if not value else (known + high) // 2
        if known >= high:
            break
        least = _least_value(instance, Limit(squares=guess) if variance else Limit(most=guess))
        known, high = max(known, min(least, guess + 1)), guess
    return known


def _least_value(instance: Instance, limit: Limit) -> int:
    """What all compute and all that crosses are worth, spread evenly; more than the limit if there is no such cut."""
    limit = informed(instance, limit)
    low, high = windows(instance, limit)
    if (low > high).any():
        return 1 << 62
    total, k = int(instance.compute[1].sum()) + 2 * sum(limit.crossing), instance.k
    if instance.problem.objective == "max-load":
        return -(-total // k)
    share, rest = divmod(total, k)
    return rest * (share + 1) ** 2 + (k - rest) * share**2


def _least_at(instance: Instance, boundary: int, low: Integers, high: Integers) -> int:
    """The least weight of flows that cross an ideal with the units below a boundary and without those above it."""
    hop = instance.problem.hop(boundary - 1)
    below, above = high < boundary, low >= boundary
    if hop is None or not below.any() or not above.any():
        return 0
    weights, flow = instance.weights(hop), max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(*_arcs(instance, weights, below, above))
    status = flow.solve(SOURCE, SINK)
    return int(flow.optimal_flow()) if status == flow.OPTIMAL else 0


def _arcs(
    instance: Instance, weights: Integers, below: Mask, above: Mask
) -> tuple[Integers, Integers, Integers]:
    """Producer → tensor → each consumer, and from each consumer back to its producer for ever.

    All units below the boundary are the source and all above it the sink.
    """
    producers, consumers, starts = instance.ends
    vertex = np.arange(2, instance.count + 2)
    vertex[below], vertex[above] = SOURCE, SINK
    each = np.arange(len(weights))
    tensors = np.repeat(each, np.diff(starts, append=len(consumers)))
    tails = np.concatenate([vertex[producers], instance.count + 2 + tensors, vertex[consumers]])
    heads = np.concatenate(
        [instance.count + 2 + each, vertex[consumers], vertex[producers[tensors]]]
    )
    capacities = np.concatenate([weights, np.full(2 * len(consumers), FOREVER)])
    # What lies on one side with all its ends cannot cross.
    inside = np.logical_or.reduceat(vertex[consumers] != SOURCE, starts) & (
        vertex[producers] != SINK
    )
    kept = np.concatenate([inside, inside[tensors], inside[tensors]]) & (tails != heads)
    return tails[kept], heads[kept], capacities[kept]
