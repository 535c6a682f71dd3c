"""What a cut is worth: loads, objectives and bounds, in exact integers and independent of any solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

from pipecompile.ir.graph import Node
from pipecompile.partition.problem import Problem

__all__ = ["lower_bound", "measures", "objective_value", "rank_loads", "stage_loads"]


def stage_loads(
    problem: Problem, assignment: Mapping[str, int], replicas: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Per stage its compute for one microbatch and its transfers, nanoseconds, as its rank feels them.

    Under `relay` a tensor crosses every boundary between its first and its last holder, and both sides of the
    boundary pay for its value and for its gradient; under `overlap` the longer of this and the compute counts.
    Under `endpoint` each stage that holds some but not all of a tensor's endpoints pays once.
    """
    k, names = problem.k, _members(problem, assignment)
    compute = [
        ceil(problem.compute_ns(names[s], last=s == k - 1) / problem.speed(s)) for s in range(k)
    ]
    transfers = (
        _endpoint(problem, assignment)
        if problem.communication == "endpoint"
        else _relay(problem, assignment)
    )
    join = max if problem.communication == "overlap" else int.__add__
    loads = [join(*pair) for pair in zip(compute, transfers, strict=True)]
    if replicas is not None:
        weights = [
            sum(problem.graph.by_name[name].parameter_bytes for name in group) for group in names
        ]
        loads = [
            -(-load // r) + problem.reduction_ns(weight, r)
            for load, r, weight in zip(loads, replicas, weights, strict=True)
        ]
    return tuple(loads)


def _members(problem: Problem, assignment: Mapping[str, int]) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(problem.k)]
    for name, stage in assignment.items():
        found[stage].append(name)
    return found


def _relay(problem: Problem, assignment: Mapping[str, int]) -> list[int]:
    paid = [0] * problem.k
    hops = [problem.hop(stage) for stage in range(problem.k - 1)]
    for tensor in problem.graph.tensors:
        holders = [assignment[name] for name in (tensor.producer, *tensor.consumers)]
        for stage in range(min(holders), max(holders)):
            if (hop := hops[stage]) is not None:
                transfer = hop.transfer_ns(tensor.bytes, tensor.gradient_bytes)
                paid[stage] += transfer
                paid[stage + 1] += transfer
    return paid


def _endpoint(problem: Problem, assignment: Mapping[str, int]) -> list[int]:
    """Ranks, not stages, hold a tensor: one that stays on a rank is not sent."""
    paid, ranks = [0] * problem.k, problem.stage_ranks
    link = problem.links.one
    assert link is not None
    for tensor in problem.graph.tensors:
        holders = {assignment[name] for name in (tensor.producer, *tensor.consumers)}
        transfer = link.transfer_ns(tensor.bytes) + link.transfer_ns(tensor.gradient_bytes)
        if len({ranks[stage] for stage in holders}) > 1:
            for stage in {ranks[s]: s for s in sorted(holders)}.values():
                paid[stage] += transfer
    return paid


def rank_loads(problem: Problem, loads: Sequence[int]) -> tuple[int, ...]:
    """The loads of stages summed over the stages of each rank."""
    summed = [0] * problem.ranks
    for rank, load in zip(problem.stage_ranks, loads, strict=True):
        summed[rank] += load
    return tuple(summed)


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

    Let C be all compute, each unit at its least, and σ the speeds of the ranks (replicated: their numbers). The
    loads satisfy Σ σ·l ≥ C, hence max l ≥ C / Σσ and, by Cauchy and Schwarz, Σ l² ≥ C² / Σσ². Besides, some stage
    holds the largest unit; and the largest units, each alone, leave the rest to the other ranks.
    """
    least = [problem.compute_ns(unit, last=bool(problem.recompute)) for unit in problem.units]
    shares, fastest = _shares(problem)
    total, alone = sum(least), ceil(max(least) / fastest)
    maximum = max(alone, ceil(total / sum(shares)), _recomputed(problem, 1))
    if problem.objective == "max-load":
        return maximum
    if problem.objective == "step-time":
        return _step_bound(problem, total)
    bounds = [
        ceil(Fraction(total**2) / sum(s * s for s in shares)),
        _recomputed(problem, 2),
        alone**2,
    ]
    if set(shares) == {1} and problem.replica_ranks is None:
        bounds += _large_units(least, problem.ranks)
    return max(bounds)


def _shares(problem: Problem) -> tuple[list[Fraction], Fraction]:
    """How much compute each rank takes per unit of load, and the largest share that one stage may have."""
    if problem.replica_ranks is not None:
        most = (
            problem.replica_ranks - problem.k + 1
        )  # convex in the numbers of replicas: one stage has all others
        return [Fraction(most), *[Fraction(1)] * (problem.k - 1)], Fraction(most)
    shares = [Fraction(1)] * problem.ranks
    for stage, rank in enumerate(problem.stage_ranks):
        shares[rank] = problem.speed(stage)
    return shares, max(shares)


def _recomputed(problem: Problem, power: int) -> int:
    """The last stage does not recompute: with ρ the most that a unit shrinks there, l₁ + … + ρ·l_k ≥ all compute."""
    k = problem.k
    if (
        not problem.recompute
        or problem.ranks != k
        or problem.speeds is not None
        or problem.replica_ranks is not None
    ):
        return 0
    full = [problem.compute_ns(unit, last=False) for unit in problem.units]
    least = [problem.compute_ns(unit, last=True) for unit in problem.units]
    shrink = max(
        (Fraction(a, b) for a, b in zip(full, least, strict=True) if b), default=Fraction(1)
    )
    return ceil(Fraction(sum(full) ** power) / (k - 1 + Fraction(shrink) ** power))


def _large_units(least: Sequence[int], ranks: int) -> list[int]:
    """With the j largest units each alone: as long as they are above the mean of the rest, no cut is more even."""
    bounds, rest = [_even_squares(sum(least), ranks)], sum(least)
    squares, left = 0, ranks
    for unit in sorted(least, reverse=True)[: ranks - 1]:
        if unit * left <= rest:
            break
        squares, rest, left = squares + unit**2, rest - unit, left - 1
        bounds.append(squares + _even_squares(rest, left))
    return bounds


def _even_squares(total: int, parts: int) -> int:
    """The least Σ x² of `parts` integers whose sum is `total`."""
    share, rest = divmod(total, parts)
    return rest * (share + 1) ** 2 + (parts - rest) * share**2


def _step_bound(problem: Problem, total: int) -> int:
    """The first microbatch must reach stage s before its rank starts on M of them: Σ_{i<s} l_i + M·l_s ≤ step.

    The step T that lets all loads meet these limits is least where each is met: then Σ l = T·(1 − (1 − 1/M)^k).
    Ranks with several stages only ever do Σ l = their sum, M times. So do those that split their backwards: they have
    the gradients of weights to do while a microbatch travels, and both halves may take less than the whole.
    """
    m, fastest = problem.microbatches, max(problem.speed(s) for s in range(problem.k))
    if not problem.whole_backwards:
        total -= sum(_saved_by_halves(node) for node in problem.graph.nodes)
    busy = ceil(m * total / (problem.ranks * fastest))
    if problem.ranks != problem.k or not problem.whole_backwards:
        return busy
    fill = 1 - (1 - Fraction(1, m)) ** problem.k
    return max(busy, ceil(total / fastest / fill))


def _saved_by_halves(node: Node) -> int:
    """What the two halves of a node's backward take less than the whole, in ns."""
    if node.backward_input_ns is None or node.backward_weight_ns is None:
        return 0
    return max(0, node.backward_ns - node.backward_input_ns - node.backward_weight_ns)
