"""What a cut is worth: its loads, its values by each objective, and lower bounds of them.

Exact integers, and independent of any solver: the solver scores its answer with it, and tests do.

**Load** here is the load of the glossary (forward, backward and recompute of one microbatch on a
rank, in ns) *and the transfers* that the problem's `communication` charges to the rank. With
communication "none", or over free links, it is the glossary's load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import ceil
from operator import mul

from pipecompile.ir.graph import Node
from pipecompile.partition.problem import PartitionProblem

WEIGHT = 1024  # of the slowest kind of device, in bounds
WEIGHT_STEPS = (Fraction(2), Fraction(3, 2), Fraction(5, 4), Fraction(9, 8), Fraction(17, 16)) * 2

__all__ = [
    "even_squares",
    "lower_bound",
    "measures",
    "objective_value",
    "rank_loads",
    "stage_loads",
    "step_of_load",
]


def stage_loads(
    problem: PartitionProblem, assignment: Mapping[str, int], replicas: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return, per stage, its compute and its transfers for one microbatch.

    Both are in ns at the speed of the stage's rank.

    What stages pay to fit their memory is not included. With `replicas` (ranks per stage) a load is
    divided among the ranks, and the all-reduce of the gradients is joined to it as transfers are.

    Transfers of a tensor from stage 0 to consumers in stages 1 and 3, w ns for value and gradient:

        communication   stage 0   1      2      3
        relay           w         2 w    2 w    w      both sides of each boundary it crosses
        endpoint        w         w      0      w      each stage with some but not all of its ends
        overlap         as relay, but the longer of transfers and compute counts
    """
    k, members = problem.k, _members(problem, assignment)
    # Rounded up once per stage, not per node.
    compute = [
        ceil(
            problem.kind_compute_ns(names, problem.kind(stage), last=stage == k - 1)
            / problem.speed(stage)
        )
        for stage, names in enumerate(members)
    ]
    is_endpoint = problem.communication == "endpoint"
    transfers = (_endpoint_transfers if is_endpoint else _relay_transfers)(problem, assignment)
    join = max if problem.communication == "overlap" else int.__add__
    loads = [join(*pair) for pair in zip(compute, transfers, strict=True)]
    if replicas is not None:
        by_name = problem.graph.by_name
        for stage, ranks in enumerate(replicas):
            parameter_bytes = sum(by_name[name].parameter_bytes for name in members[stage])
            reduction = problem.reduction_ns(parameter_bytes, ranks)
            loads[stage] = join(-(-loads[stage] // ranks), reduction)
    return tuple(loads)


def _members(problem: PartitionProblem, assignment: Mapping[str, int]) -> list[list[str]]:
    members: list[list[str]] = [[] for _ in range(problem.k)]
    for name, stage in assignment.items():
        members[stage].append(name)
    return members


def _relay_transfers(problem: PartitionProblem, assignment: Mapping[str, int]) -> list[int]:
    """Return, per stage, the time of its transfers, each boundary over its own hop."""
    transfers = [0] * problem.k
    hops = [problem.hop(stage) for stage in range(problem.k - 1)]
    for tensor in problem.graph.tensors:
        stages = [assignment[name] for name in (tensor.producer, *tensor.consumers)]
        # Min and max also score assignments that are not in order, as tests do.
        for stage in range(min(stages), max(stages)):
            if (hop := hops[stage]) is not None:
                ns = hop.transfer_ns(tensor.bytes, tensor.gradient_bytes)
                transfers[stage] += ns
                transfers[stage + 1] += ns
    return transfers


def _endpoint_transfers(problem: PartitionProblem, assignment: Mapping[str, int]) -> list[int]:
    """Return, per stage, the time of its transfers; a tensor that stays on a rank is not sent.

    A rank with several stages pays once for a tensor: with the last of its stages that has an end.
    """
    transfers, ranks = [0] * problem.k, problem.stage_ranks
    link = problem.links.one
    assert link is not None
    for tensor in problem.graph.tensors:
        stages = {assignment[name] for name in (tensor.producer, *tensor.consumers)}
        last_stage_of_rank = {ranks[stage]: stage for stage in sorted(stages)}
        if len(last_stage_of_rank) > 1:
            ns = link.transfer_ns(tensor.bytes) + link.transfer_ns(tensor.gradient_bytes)
            for stage in last_stage_of_rank.values():
                transfers[stage] += ns
    return transfers


def rank_loads(problem: PartitionProblem, loads: Sequence[int]) -> tuple[int, ...]:
    """Return the loads of stages, summed over the stages of each rank."""
    summed = [0] * problem.ranks
    for rank, load in zip(problem.stage_ranks, loads, strict=True):
        summed[rank] += load
    return tuple(summed)


def measures(loads: Sequence[int]) -> dict[str, int]:
    """Return the objectives' values for the loads of ranks, by their names in results.

    These are the largest load (ns), Σ load² (ns²), and the variance of the loads, rounded down
    (ns²).
    """
    # Var = E[load²] − E[load]², over a common denominator to stay in integers.
    squares, count = sum(load * load for load in loads), len(loads)
    return {
        "max_load_ns": max(loads),
        "sum_of_squares_ns2": squares,
        "variance_ns2": (count * squares - sum(loads) ** 2) // count**2,
    }


def objective_value(objective: str, loads: Sequence[int]) -> int:
    """Return the value that the search minimises.

    It is Σ load² for "variance", the largest load for "max-load", and Σ load for "total-load".
    """
    if objective == "total-load":
        return sum(loads)
    name = {"variance": "sum_of_squares_ns2", "max-load": "max_load_ns"}[objective]
    return measures(loads)[name]


def lower_bound(problem: PartitionProblem) -> int:
    """Return a lower bound of the value of all cuts, in any order and with free transfers.

    Let C be all compute, each unit at its least, and σ the speed of each rank (with replicas: their
    numbers). The loads satisfy Σ σ·load ≥ C. Hence max load ≥ C / Σσ and, by Cauchy and Schwarz,
    Σ load² ≥ C² / Σσ². Besides, some stage has the largest unit; and if the largest units are above
    the mean, each of them alone, the other ranks share the rest (`_large_units_bounds`). For the
    max load, some rank has several of the largest units (`_crowded_bound`).
    """
    # The last stage does not recompute, so each unit is least there.
    least = [problem.compute_ns(unit, last=bool(problem.recompute)) for unit in problem.units]
    shares, fastest = _shares(problem)
    total, alone = sum(least), ceil(max(least) / fastest)
    if problem.objective == "total-load":
        return ceil(total / fastest)
    equal_ranks = set(shares) == {1} and problem.replica_ranks is None
    if problem.objective == "max-load":
        crowded = _crowded_bound(least, problem.ranks) if equal_ranks else 0
        bounds = [alone, crowded, ceil(total / sum(shares)), _recompute_bound(problem, 1)]
        return max(*bounds, _kinds_bound(problem, 1))
    if problem.objective == "step-time":
        return _step_bound(problem, total)
    even = ceil(Fraction(total**2) / sum(share * share for share in shares))
    bounds = [even, _recompute_bound(problem, 2), alone**2, _kinds_bound(problem, 2)]
    # With different speeds, the largest units need not be alone on the fastest ranks.
    if equal_ranks:
        bounds += _large_units_bounds(least, problem.ranks)
    return max(bounds)


def _shares(problem: PartitionProblem) -> tuple[list[Fraction], Fraction]:
    """Return each rank's compute per ns of load, and the largest share that one stage may have."""
    if problem.replica_ranks is not None:
        # Σ σ² is convex in the numbers of replicas: it is most where one stage has all spare ranks.
        most = Fraction(problem.replica_ranks - problem.k + 1)
        return [most, *[Fraction(1)] * (problem.k - 1)], most
    shares = [Fraction(1)] * problem.ranks
    for stage, rank in enumerate(problem.stage_ranks):
        shares[rank] = problem.speed(stage)
    return shares, max(shares)


def _recompute_bound(problem: PartitionProblem, power: int) -> int:
    """Return a lower bound of the largest load (power 1) or of Σ load² (power 2); or 0.

    The bound holds under recompute; it is 0 where it does not apply.

    The last stage does not recompute. Let ρ be the most by which a unit shrinks there. If the load
    of the last stage is counted ρ times, the loads sum to all compute with recompute, C: then Σ
    load ^ power ≥ C ^ power / (k − 1 + ρ ^ power), as in `lower_bound`. With 6 ns a unit, 4 of them
    in the last stage, ρ is 3/2; for C = 30 and k = 2 the largest load is 30 / 2.5 = 12 at least.
    """
    k = problem.k
    one_rank_each = problem.ranks == k and problem.replica_ranks is None
    if not problem.recompute or not one_rank_each or problem.speeds is not None:
        return 0
    full = [problem.compute_ns(unit, last=False) for unit in problem.units]
    least = [problem.compute_ns(unit, last=True) for unit in problem.units]
    ratios = (Fraction(a, b) for a, b in zip(full, least, strict=True) if b)
    ratio = max(ratios, default=Fraction(1))
    return ceil(Fraction(sum(full) ** power) / (k - 1 + ratio**power))


def _kinds_bound(problem: PartitionProblem, power: int) -> int:
    """Return a lower bound of the largest load (power 1) or of Σ load² (power 2) on ranks of
    several kinds; 0 for equal ranks.

    Let w be weights of the kinds, and t their times of a unit. Each unit is on some kind, so that
    Σ w·load ≥ Σ over units of the least w·t =: C. Hence max load ≥ C / Σw and, by Cauchy and
    Schwarz, Σ load² ≥ C² / Σw², both sums over ranks. On one device of 1 ns and one of 3 ns a unit,
    12 units at w = 3 and 1 have C = 36, and the largest load is 9 at least.

    All weights give a bound. The best for one ratio of times is that ratio; others are tried in
    turns, from there on.
    """
    kinds = range(len(problem.graphs))
    if len(kinds) == 1:
        return 0
    last = bool(problem.recompute)
    units = [
        [problem.kind_compute_ns(unit, kind, last=last) for kind in kinds] for unit in problem.units
    ]
    ranks = [problem.kind(stage) for stage in range(problem.k)]
    totals = [max(1, sum(times[kind] for times in units)) for kind in kinds]
    weights = [WEIGHT * max(totals) // total for total in totals]
    best = _weighed_bound(units, ranks, weights, power)
    for step, kind in product(WEIGHT_STEPS, kinds):
        for factor in (step, 1 / step):
            other = [*weights]
            other[kind] = max(1, round(other[kind] * factor))
            bound = _weighed_bound(units, ranks, other, power)
            if bound > best:
                best, weights = bound, other
    return best


def _weighed_bound(
    units: Sequence[Sequence[int]], ranks: Sequence[int], weights: Sequence[int], power: int
) -> int:
    """Return the bound by these weights of the kinds; `units` have times by kind, `ranks` kinds."""
    least = sum(min(map(mul, weights, times)) for times in units)
    together = sum(int(weights[kind]) ** power for kind in ranks)
    return ceil(Fraction(int(least) ** power, int(together)))


def _large_units_bounds(least: Sequence[int], ranks: int) -> list[int]:
    """Return lower bounds of Σ load² with the j largest units each alone on a rank, j = 0, 1, …

    While the next unit is above the mean of what is left, no cut is more even. For units of 9, 8,
    1, 1 and 1 on 3 ranks: 9² + 8² + 3² = 154.
    """
    total, ranks_left, squares = sum(least), ranks, 0
    bounds = [even_squares(total, ranks)]
    for unit in sorted(least, reverse=True)[: ranks - 1]:
        # From here on units are below the mean, and may share ranks evenly.
        # 9, 8, 1, 1, 1 on 3 ranks: 9 is above the mean 20 / 3, and 8 above 11 / 2 of what is left.
        if unit * ranks_left <= total:
            break
        squares, total, ranks_left = squares + unit**2, total - unit, ranks_left - 1
        bounds.append(squares + even_squares(total, ranks_left))
    return bounds


def _crowded_bound(least: Sequence[int], ranks: int) -> int:
    """Return a lower bound of the largest load: some rank has q of the (q − 1) · ranks + 1 largest
    units, whatever they are, for q = 1, 2, …

    For 80 layers of 100 and a head of 114 on 8 ranks, a rank has 11 of these 81 units, and so a
    load of at least 1,100, although the mean is 1,014.25. It is the bound of P || Cmax (Dell'Amico
    and Martello, ORSA Journal on Computing 7, 1995).
    """
    largest_first = sorted(least, reverse=True)
    bounds = [
        # `end` units on `ranks` ranks, with q − 1 on each one over: some
        # rank has q. The least that these can be is the q smallest of them.
        sum(largest_first[end - crowd : end])
        for crowd, end in enumerate(range(1, len(least) + 1, ranks), start=1)
    ]
    return max(bounds)


def even_squares(total: int, parts: int) -> int:
    """Return the least Σ x² of `parts` integers that sum to `total`.

    For example, 3 parts of 11 are 4, 4 and 3, so the sum is 41.
    """
    share, rest = divmod(total, parts)
    return rest * (share + 1) ** 2 + (parts - rest) * share**2


def _step_bound(problem: PartitionProblem, total: int) -> int:
    """Return a lower bound of the step of all cuts, with `total` compute.

    The first microbatch must reach stage s before its rank starts on M of them, and its gradient
    must return: Σ_{i<s} load_i + M·load_s ≤ step.

        stage 0   █0  █0  █0  █0                 k = 2, M = 4
        stage 1   ·   █1  █1  █1  █1             load_0 + 4·load_1 ≤ step

    The step T that allows the most compute meets each of these: load_s = T/M · (1 − 1/M)^s, and
    then Σ load = T·(1 − (1 − 1/M)^k).

    Ranks with several stages, and schedules that split backwards, are only bounded by M times their
    compute: while a microbatch travels they have other work, such as weight backwards. Both
    halves of a split backward may take less than the whole.
    """
    m, fastest = problem.microbatches, max(problem.speed(s) for s in range(problem.k))
    if not problem.whole_backwards:
        total -= sum(_saved_by_splitting(node) for node in problem.graph.nodes)
    # At best all ranks are equally busy, without waiting.
    busy = ceil(m * total / (problem.ranks * fastest))
    if problem.ranks != problem.k or not problem.whole_backwards:
        return busy
    filled = 1 - (1 - Fraction(1, m)) ** problem.k
    return max(busy, ceil(total / fastest / filled))


def step_of_load(problem: PartitionProblem, load: int) -> int:
    """Return how long a step takes at least in which some rank has a load of at least so much."""
    # The load of a rank that is faster, or has a part of the microbatches, is rounded up.
    rounded = int(problem.speeds is not None)
    return problem.microbatches * max(0, load - rounded)


def _saved_by_splitting(node: Node) -> int:
    """Return the ns by which a node's split backward is shorter than the whole; 0 if unknown."""
    if node.backward_input_ns is None or node.backward_weight_ns is None:
        return 0
    return max(0, node.backward_ns - node.backward_input_ns - node.backward_weight_ns)
