"""Granularity "auto": a cut between blocks, of which those at stage ends are then split.

This is multilevel partitioning: a coarse graph is cut, then made finer where the cut lies. `solver`
calls it. For five equal blocks of two modules and k = 2, the largest load 12 becomes 10:

    blocks     [ a a | b b ]  8 : 12       stage 0 ends after block 1
               0   1 | 2 3 4
    split      0 [1'][1"] | [2'][2"] 3 4   blocks 1 and 2 are split into their modules
    modules    0  1' 1"  2' | 2" 3 4       10 : 10, which meets the lower bound
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec

from pipecompile.errors import InfeasibleError
from pipecompile.partition.budget import CUT_UNITS_PER_SECOND
from pipecompile.partition.coarsening import coarse_groups, finer_groups
from pipecompile.partition.flat_solver import solve_flat
from pipecompile.partition.min_cut_bound import min_cut_bound
from pipecompile.partition.objective import lower_bound, step_of_load
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.units import Unit
from pipecompile.partition.windows import Limit

__all__ = ["TOLERANCE", "groups_at_stage_ends", "solve_multilevel", "with_groups"]

# A cut is near enough if value − bound ≤ value / TOLERANCE: 1 % of loads, 0.01 % of their squares.
TOLERANCE = {"max-load": 100, "step-time": 100, "total-load": 100, "variance": 10_000}
LATER_SHARE = 0.25  # of the budget, for each search after the first one that finds a cut
TESTS = 6  # of values for which minimum cuts bound the transfers


def solve_multilevel(
    problem: PartitionProblem, seconds: float, *, explained: bool = True
) -> tuple[Partition, tuple[Unit, ...]]:
    """Return the best cut between blocks or with some of them split, and the groups left whole.

    A block is split into its modules and those into their operators: all of them while no cut
    exists, then those at the stage ends of the best cut, until its value is near the bound. Bound
    and proof hold for all cuts between operators. Raise InfeasibleError, `explained` or not, if
    there is no cut.
    """
    finer = finer_groups(problem.graph)
    groups, best = _coarsest_cut(problem, finer, seconds, explained)
    bound = _bound_between_operators(problem, best, groups, seconds)
    while (best.search.value - bound) * TOLERANCE[problem.objective] > best.search.value:
        at_ends = groups_at_stage_ends(with_groups(problem, groups), best.assignment, groups)
        if not at_ends:
            break
        groups = _split(groups, at_ends, finer)
        # A short search may find no cut, although the best one so far still is a cut.
        with suppress(InfeasibleError):
            cut = solve_flat(
                with_groups(problem, groups), seconds=LATER_SHARE * seconds, explained=False
            )
            best = min(best, cut, key=_rank_of_cut)
            bound = max(bound, _bound_between_operators(problem, cut, groups, seconds))
    value = best.search.value
    gap = (value - bound) / value if value else 0.0
    search = msgspec.structs.replace(best.search, bound=bound, gap=gap, proven=value == bound)
    return replace(best, search=search), groups


def _coarsest_cut(
    problem: PartitionProblem,
    finer: Mapping[Unit, tuple[Unit, ...]],
    seconds: float,
    explained: bool,
) -> tuple[tuple[Unit, ...], Partition]:
    """Return the groups of the coarsest level that has a cut, and that cut."""
    groups = coarse_groups(problem.graph, "blocks")
    while groups:
        with suppress(InfeasibleError):
            level = with_groups(problem, groups)
            return groups, solve_flat(level, seconds=seconds, explained=False)
        groups = _split(groups, groups, finer)
    return groups, solve_flat(with_groups(problem, groups), seconds=seconds, explained=explained)


def with_groups(problem: PartitionProblem, groups: tuple[Unit, ...]) -> PartitionProblem:
    """Return the problem in which the nodes of each group also share a stage."""
    return replace(problem, granularity="operators", together=(*problem.together, *groups))


def _split(
    groups: tuple[Unit, ...], chosen: Collection[Unit], finer: Mapping[Unit, tuple[Unit, ...]]
) -> tuple[Unit, ...]:
    """Return the groups with the `chosen` ones split one level.

    Groups of single modules disappear.
    """
    remaining: list[Unit] = []
    for group in groups:
        remaining += finer.get(group, ()) if group in chosen else (group,)
    return tuple(remaining)


def _rank_of_cut(partition: Partition) -> tuple[int, int, int]:
    """Return a sort key: the value of the objective, then those of the others."""
    values = partition.search.values
    return partition.search.value, values["max_load_ns"], values["sum_of_squares_ns2"]


def _bound_between_operators(
    problem: PartitionProblem, partition: Partition, groups: tuple[Unit, ...], seconds: float
) -> int:
    """Return a lower bound of all cuts between operators, of which `partition` is one."""
    if not groups:
        return partition.search.bound
    bound, value = lower_bound(problem), partition.search.value
    if problem.objective == "step-time":
        if not problem.whole_backwards:
            return bound
        # Some rank computes the largest load M times, whatever the schedule does.
        compute = replace(problem, objective="max-load", communication="none")
        return max(bound, step_of_load(problem, lower_bound(compute)))
    limit = Limit(squares=value) if problem.objective == "variance" else Limit(most=value)
    size = len(problem.units) * problem.k
    tests = min(TESTS, int(seconds * CUT_UNITS_PER_SECOND / size))
    return min_cut_bound(UnitGraph.of(problem), limit, bound, tests)


def groups_at_stage_ends(
    problem: PartitionProblem, assignment: Mapping[str, int], groups: Collection[Unit]
) -> set[Unit]:
    """Return the groups at an end of their stage.

    Nothing in the stage feeds such a group, or it feeds nothing there.

    Order would let such a group move to the stage before, or after. The first stage has no end on
    the left and the last stage none on the right.
    """
    unit_of = {name: unit for unit in problem.units for name in unit}
    edges = [
        (tensor.producer, name) for tensor in problem.graph.tensors for name in tensor.consumers
    ]
    fed, feeding = set[Unit](), set[Unit]()
    for before, after in (*edges, *problem.precedence):
        if unit_of[before] != unit_of[after] and assignment[before] == assignment[after]:
            feeding.add(unit_of[before])
            fed.add(unit_of[after])

    def is_at_end(unit: Unit) -> bool:
        stage = assignment[unit[0]]
        at_left = stage > 0 and unit not in fed
        return at_left or (stage < problem.k - 1 and unit not in feeding)

    return {group for group in groups if is_at_end(unit_of[group[0]])}
