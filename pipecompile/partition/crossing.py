"""A bound where transfers count: what must cross each boundary, by minimum cuts.

Under `relay` the loads sum to all compute and twice what crosses the boundaries. Windows say which units lie below a
boundary and which above in every cut within a limit; the least that crosses any ideal between the two is a minimum
cut (a tensor is one arc that all its consumers share; what a unit needs lies on its side), so no cut sends less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ortools.graph.python import max_flow

from pipecompile.partition.boundaries import Rows
from pipecompile.partition.instance import Instance, Integers
from pipecompile.partition.windows import Limit, windows

__all__ = ["crossing_bound", "informed"]

FOREVER = 1 << 60  # a capacity that no cut pays


def informed(instance: Instance, limit: Limit, rounds: int = 3) -> Limit:
    """The limit with what crosses each boundary at the least; the windows that it leaves make that more, and so on."""
    if not _is_sum(instance):
        return limit
    for _ in range(rounds):
        low, high = windows(instance, limit)
        found = tuple(_least_at(instance, boundary, low, high) for boundary in range(1, instance.k))
        if found == limit.crossing or (low > high).any():
            break
        limit = replace(limit, crossing=found)
    return limit


def _is_sum(instance: Instance) -> bool:
    """Whether the loads sum to all compute and twice what crosses."""
    problem = instance.problem
    alike = problem.ranks == instance.k and problem.speeds is None and problem.replica_ranks is None
    return problem.communication == "relay" and alike and bool(instance.links)


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
    link = instance.problem.boundary_link(boundary - 1)
    if link is None:
        return 0
    below, above = np.flatnonzero(high < boundary), np.flatnonzero(low >= boundary)
    return _least_crossing(instance, instance.weights(link), below, above)


def _least_crossing(instance: Instance, weights: Integers, below: Rows, above: Rows) -> int:
    """The least weight of flows that cross an ideal with the units `below` and without those `above`."""
    if not len(below) or not len(above):
        return 0
    flow, count = max_flow.SimpleMaxFlow(), instance.count
    source, sink = count + len(weights), count + len(weights) + 1
    tails, heads, capacities = _arcs(instance, weights)
    flow.add_arcs_with_capacity(
        np.concatenate([tails, np.full(len(below), source), above]),
        np.concatenate([heads, below, np.full(len(above), sink)]),
        np.concatenate([capacities, np.full(len(below) + len(above), FOREVER)]),
    )
    status = flow.solve(source, sink)
    return int(flow.optimal_flow()) if status == flow.OPTIMAL else 0


def _arcs(instance: Instance, weights: Integers) -> tuple[Integers, Integers, Integers]:
    """Producer → tensor → each consumer, and from each consumer back to its producer for ever."""
    producers, consumers, starts = instance.ends
    each = np.arange(len(weights))
    tensors = np.repeat(each, np.diff(starts, append=len(consumers)))
    tails = np.concatenate([producers, instance.count + tensors, consumers])
    heads = np.concatenate([instance.count + each, consumers, producers[tensors]])
    capacities = np.concatenate([weights, np.full(2 * len(consumers), FOREVER)])
    return tails, heads, capacities
