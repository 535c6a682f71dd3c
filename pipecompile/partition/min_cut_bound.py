"""The min-cut bound: a lower bound of a cut's value from what must cross each boundary.

Under `relay` the loads of all stages sum to all compute and twice what crosses the boundaries.
Stage windows say which units lie below a boundary and which above it, in every cut within a limit.
The least weight that crosses any ideal between the two is a minimum cut of a flow network: all
units below are the source, all units above are the sink.

    source ═▶ u ──9──▶ tensor ──∞──▶ v ═▶ sink     a tensor is one arc: it is paid for once,
                              ╲──∞──▶ w            however many of its consumers lie above
                                      │
              u ◀────────∞────────────┘            consumer → producer: no cut has a consumer
                                                   below the boundary and its producer above
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ortools.graph.python import max_flow

from pipecompile.partition.objective import even_squares
from pipecompile.partition.unit_graph import Integers, Mask, UnitGraph
from pipecompile.partition.windows import Limit, windows

__all__ = ["min_cut_bound", "with_crossing_bounds"]

UNLIMITED = 1 << 60  # the capacity of an arc that no minimum cut contains
NO_CUT = 1 << 62  # above all values
SOURCE, SINK, FIRST_UNIT = 0, 1, 2  # vertices of the network
UNDECIDED_MAX = 1_000_000  # units that may lie on either side, summed over the boundaries


def with_crossing_bounds(unit_graph: UnitGraph, limit: Limit, rounds: int = 3) -> Limit:
    """Return the limit with lower bounds of what crosses each boundary in any cut within it.

    They narrow the windows, which raises the bounds, and so on for some rounds. The limit itself is
    returned where loads are no such sums, or where minimum cuts would take too long.
    """
    if not _loads_are_sums(unit_graph):
        return limit
    for _ in range(rounds):
        low, high = windows(unit_graph, limit)
        if int(np.maximum(high - low, 0).sum()) > UNDECIDED_MAX:
            break
        crossing = tuple(
            _min_cut(unit_graph, boundary, low, high) for boundary in range(1, unit_graph.k)
        )
        if crossing == limit.crossing or (low > high).any():
            break
        limit = replace(limit, crossing=crossing)
    return limit


def _loads_are_sums(unit_graph: UnitGraph) -> bool:
    """Return whether loads sum to all compute and twice what crosses, and anything may cross."""
    problem = unit_graph.problem
    one_stage_a_rank = problem.ranks == unit_graph.k and problem.replica_ranks is None
    is_sum = problem.communication == "relay" and one_stage_a_rank and problem.speeds is None
    return is_sum and bool(unit_graph.hops)


def min_cut_bound(unit_graph: UnitGraph, limit: Limit, known: int, tests: int) -> int:
    """Return a lower bound of the value of all cuts, at least the `known` one.

    There must be a cut within the limit, whose value the limit is. The bound is found by bisection
    between `known` and that value: if every cut of value v or less has a value of b at least, then
    no cut is below min(b, v + 1). With v = 100 and b = 103, no cut is below 101.
    """
    if not _loads_are_sums(unit_graph):
        return known
    if unit_graph.problem.objective == "total-load":
        return max(known, _least_total(unit_graph))
    is_variance = unit_graph.problem.objective == "variance"
    high = limit.squares if is_variance else limit.most
    if high is None:
        return known
    for test in range(tests):
        if known >= high:
            break
        # The first guess is the value of the known cut: a bound that meets it proves that cut.
        # Smaller guesses narrow the windows more, and so raise the bound of what is within them.
        guess = high if test == 0 else (known + high) // 2
        least = _least_value(unit_graph, Limit(squares=guess) if is_variance else Limit(most=guess))
        known, high = max(known, min(least, guess + 1)), guess
    return known


def _least_total(unit_graph: UnitGraph) -> int:
    """Return a lower bound of Σ load: all compute, and twice what must cross each boundary."""
    crossing = with_crossing_bounds(unit_graph, Limit()).crossing
    return int(unit_graph.compute[1].sum()) + 2 * sum(crossing)


def _least_value(unit_graph: UnitGraph, limit: Limit) -> int:
    """Return a lower bound of the value of cuts within the limit: all time, spread evenly."""
    limit = with_crossing_bounds(unit_graph, limit)
    low, high = windows(unit_graph, limit)
    if (low > high).any():
        return NO_CUT
    total, k = int(unit_graph.compute[1].sum()) + 2 * sum(limit.crossing), unit_graph.k
    if unit_graph.problem.objective == "max-load":
        return -(-total // k)
    return even_squares(total, k)


def _min_cut(unit_graph: UnitGraph, boundary: int, low: Integers, high: Integers) -> int:
    """Return the least transfer time over a boundary, of all ideals that the windows allow."""
    hop = unit_graph.problem.hop(boundary - 1)
    below, above = high < boundary, low >= boundary
    if hop is None or not below.any() or not above.any():
        return 0
    network = max_flow.SimpleMaxFlow()
    network.add_arcs_with_capacity(*_arcs(unit_graph, unit_graph.weights(hop), below, above))
    status = network.solve(SOURCE, SINK)
    return int(network.optimal_flow()) if status == network.OPTIMAL else 0


def _arcs(
    unit_graph: UnitGraph, weights: Integers, below: Mask, above: Mask
) -> tuple[Integers, Integers, Integers]:
    """Return tails, heads and capacities of the network's arcs.

    For each flow: producer → flow with its weight, and without a limit flow → consumer and
    consumer → producer for each consumer. Vertices are the source, the sink, the units, the flows.
    """
    producers, consumers, starts = unit_graph.flow_ends
    unit_vertex = np.arange(FIRST_UNIT, unit_graph.count + FIRST_UNIT)
    unit_vertex[below], unit_vertex[above] = SOURCE, SINK
    flows = np.arange(len(weights))
    flow_vertex = unit_graph.count + FIRST_UNIT + flows
    flow_of_consumer = np.repeat(flows, np.diff(starts, append=len(consumers)))
    from_, to = unit_vertex[producers], unit_vertex[consumers]
    tails = np.concatenate([from_, flow_vertex[flow_of_consumer], to])
    heads = np.concatenate([flow_vertex, to, from_[flow_of_consumer]])
    capacities = np.concatenate([weights, np.full(2 * len(consumers), UNLIMITED)])
    # A flow whose ends all lie on one side cannot cross, and needs no arcs.
    may_cross = np.logical_or.reduceat(to != SOURCE, starts) & (from_ != SINK)
    needed = np.concatenate([may_cross, may_cross[flow_of_consumer], may_cross[flow_of_consumer]])
    needed &= tails != heads
    return tails[needed], heads[needed], capacities[needed]
