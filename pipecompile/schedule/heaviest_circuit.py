"""The heaviest circuit of a graph of waiting: the pace of what repeats itself for ever.

Nodes are the events of one period. An edge says that its target ends `weight` or more after its
source, of `periods` before. Then no event repeats faster than the heaviest circuit, by its weight
for each period, and in the end all that hang together repeat as fast (Baccelli et al.,
Synchronization and Linearity, 1992, theorem 3.28).

The ratio is raised to that of a heavier circuit, as long as there is one (Lawler, Combinatorial
Optimization, 1976, section 3.13). Whole numbers make it exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Edge", "heaviest_circuit"]


class Edge(NamedTuple):
    """The end of `target` is `weight` or more after that of `source`, `periods` before."""

    source: int
    target: int
    weight: int
    periods: int


def heaviest_circuit(edges: Sequence[Edge], nodes: int) -> Fraction:
    """Return the most weight for each period of any circuit, at least 0.

    Circuits without weight or with more than zero periods only are expected: any other one would
    wait for itself.
    """
    ratio = Fraction(0)
    # A loop of weight 3 in 1 period and a circuit of 5 + 4 in 2 periods: 9/2. Each circuit found
    # is heavier than the one before and visits no node twice, of which there are finitely many.
    while circuit := _heavier_circuit(edges, nodes, ratio):
        periods = sum(edge.periods for edge in circuit)
        assert periods > 0, "a circuit that waits for itself"
        ratio = Fraction(sum(edge.weight for edge in circuit), periods)
    return ratio


def _heavier_circuit(edges: Sequence[Edge], nodes: int, ratio: Fraction) -> list[Edge]:
    """Return a circuit that is heavier than the ratio; [] if there is none.

    Distances grow along edges (Bellman and Ford). As soon as edges that made them grow form a
    circuit, it is such a one.
    """
    scale, less = ratio.denominator, ratio.numerator
    # With the ratio 3/1 the circuit 5 + 4 in 2 periods gains 9 × 1 − 2 × 3 = 3, and the loop 0:
    # only what beats the ratio gains. Multiplied by the denominator, all of it is in whole numbers.
    gains = [(e.source, e.target, e.weight * scale - e.periods * less, e) for e in edges]
    distances, last = [0] * nodes, dict[int, Edge]()
    while True:
        has_grown = False
        for source, target, gain, edge in gains:
            if distances[source] + gain > distances[target]:
                distances[target] = distances[source] + gain
                last[target], has_grown = edge, True
        if not has_grown:
            return []
        if circuit := _circuit(last):
            return circuit


def _circuit(last: dict[int, Edge]) -> list[Edge]:
    """Return a circuit of edges, of which each target has the one that leads there; [] if none."""
    seen: dict[int, int] = {}  # by node the walk that met it
    for walk, start in enumerate(last):
        node = start
        while node in last and node not in seen:
            seen[node] = walk
            node = last[node].source
        if seen.get(node) == walk:
            circuit = [last[node]]
            while circuit[-1].source != node:
                circuit.append(last[circuit[-1].source])
            return circuit
    return []
