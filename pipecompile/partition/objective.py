"""What a cut is worth: loads, objectives and bounds, in exact integers and independent of any solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

from pipecompile.partition.problem import Problem

__all__ = ["lower_bound", "measures", "objective_value", "stage_loads"]


def stage_loads(problem: Problem, assignment: Mapping[str, int]) -> tuple[int, ...]:
    """Per stage its compute for one microbatch plus its transfers, nanoseconds.

    Under `relay` a tensor crosses every boundary between its first and its last holder, and both sides of the
    boundary pay for its value and for its gradient.
    """
    k = problem.k
    loads = [
        problem.compute_ns((name for name in assignment if assignment[name] == s), last=s == k - 1) for s in range(k)
    ]
    if problem.communication == "relay":
        for tensor in problem.graph.tensors:
            holders = [assignment[name] for name in (tensor.producer, *tensor.consumers)]
            transfer = problem.link.transfer_ns(tensor.bytes) + problem.link.transfer_ns(tensor.gradient_bytes)
            for stage in range(min(holders), max(holders)):
                loads[stage] += transfer
                loads[stage + 1] += transfer
    return tuple(loads)


def measures(loads: Sequence[int]) -> dict[str, int]:
    """The objectives' values: the largest load, Σ load², and the mean squared deviation from the mean (floor)."""
    squares, count = sum(load * load for load in loads), len(loads)
    return {
        "max_load_ns": max(loads),
        "sum_of_squares_ns2": squares,
        "variance_ns2": (count * squares - sum(loads) ** 2) // count**2,
    }


def objective_value(objective: str, loads: Sequence[int]) -> int:
    """What the search minimises: Σ load² for `variance`, the largest load for `max-load`."""
    return measures(loads)[{"variance": "sum_of_squares_ns2", "max-load": "max_load_ns"}[objective]]


def lower_bound(problem: Problem) -> int:
    """No cut of the graph, in whatever order, is worth less. Transfers are taken as free.

    Let C be all compute with recomputation, and let a unit shrink at most by the factor ρ in the last stage, which
    does not recompute. Then the loads satisfy l₁ + … + ρ·l_k ≥ C, hence max l ≥ C / (k − 1 + ρ) and, by Cauchy and
    Schwarz, Σ l² ≥ C² / (k − 1 + ρ²). Besides, some stage holds the largest unit.
    """
    k = problem.k
    full = [problem.compute_ns(unit, last=False) for unit in problem.units]
    least = [problem.compute_ns(unit, last=True) for unit in problem.units]
    shrink = max((Fraction(a, b) for a, b in zip(full, least, strict=True) if b), default=Fraction(1))
    total, largest = sum(least), max(least)
    if problem.objective == "max-load":
        return max(largest, ceil(sum(full) / (k - 1 + shrink)))
    bounds = [ceil(sum(full) ** 2 / (k - 1 + shrink**2)), _even_squares(total, k)]
    if k > 1 and largest * k > total:
        bounds.append(largest**2 + _even_squares(total - largest, k - 1))
    return max(bounds)


def _even_squares(total: int, parts: int) -> int:
    """The least Σ x² of `parts` integers whose sum is `total`."""
    share, rest = divmod(total, parts)
    return rest * (share + 1) ** 2 + (parts - rest) * share**2
