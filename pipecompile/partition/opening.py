"""Granularity "auto": cuts between blocks, and opens those where stages end if balance or memory needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec

from pipecompile.errors import InfeasibleError
from pipecompile.partition.hierarchy import inside, kept_together
from pipecompile.partition.instance import Instance
from pipecompile.partition.min_cut_bound import crossing_bound
from pipecompile.partition.objective import lower_bound
from pipecompile.partition.problem import Problem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import CUTS_PER_SECOND, solve
from pipecompile.partition.units import Unit
from pipecompile.partition.windows import Limit

__all__ = ["NEAR", "at_stage_ends", "keeping", "solve_opening"]

# A part of the value: 1 % of loads is 0.01 % of their squares.
NEAR = {"max-load": 100, "step-time": 100, "variance": 10_000}
LATER = 0.25  # of the budget, for each search after the first that finds a cut
TESTS = 6  # of values for which minimum cuts bound what is sent


def solve_opening(
    problem: Problem, seconds: float, *, explained: bool = True
) -> tuple[Partition, tuple[Unit, ...]]:
    """The best cut between blocks, or a better one with some of them opened until it is near what any cut is worth.

    A block opens into its modules and those into their operators: all of them as long as there is no cut, then those
    at the ends of the stages of the best one. Bound and proof are about all cuts between operators. With it comes what
    is still kept together. InfeasibleError, `explained` or not, if there is no cut.
    """
    parts = inside(problem.graph)
    closed, best = _first(problem, parts, seconds, explained)
    bound = _bound(problem, best, closed, seconds)
    while (best.search.value - bound) * NEAR[problem.objective] > best.search.value:
        ends = at_stage_ends(keeping(problem, closed), best.assignment, closed)
        if not ends:
            break
        closed = _opened(closed, ends, parts)
        with suppress(
            InfeasibleError
        ):  # the best cut is still one, but a short search may find none
            found = solve(keeping(problem, closed), seconds=LATER * seconds, explained=False)
            best = min(best, found, key=_worth)
            bound = max(bound, _bound(problem, found, closed, seconds))
    value = best.search.value
    gap = (value - bound) / value if value else 0.0
    search = msgspec.structs.replace(best.search, bound=bound, gap=gap, proven=value == bound)
    return replace(best, search=search), closed


def _first(
    problem: Problem, parts: Mapping[Unit, tuple[Unit, ...]], seconds: float, explained: bool
) -> tuple[tuple[Unit, ...], Partition]:
    """The coarsest level that has a cut, and that cut."""
    closed = kept_together(problem.graph, "blocks")
    while closed:
        with suppress(InfeasibleError):
            return closed, solve(keeping(problem, closed), seconds=seconds, explained=False)
        closed = _opened(closed, closed, parts)
    return closed, solve(keeping(problem, closed), seconds=seconds, explained=explained)


def keeping(problem: Problem, closed: tuple[Unit, ...]) -> Problem:
    """The problem that remains if these sets of nodes are kept together."""
    return replace(problem, granularity="operators", together=(*problem.together, *closed))


def _opened(
    closed: tuple[Unit, ...], ends: Collection[Unit], parts: Mapping[Unit, tuple[Unit, ...]]
) -> tuple[Unit, ...]:
    """What is still kept together when those in `ends` are opened one level."""
    return tuple(
        part for names in closed for part in (parts.get(names, ()) if names in ends else (names,))
    )


def _worth(found: Partition) -> tuple[int, int, int]:
    """The smaller the better, by the objective and then the others."""
    values = found.search.values
    return found.search.value, values["max_load_ns"], values["sum_of_squares_ns2"]


def _bound(problem: Problem, found: Partition, closed: tuple[Unit, ...], seconds: float) -> int:
    """No cut between operators is worth less, where one is worth what `found` is."""
    if not closed:
        return found.search.bound
    bound, value = lower_bound(problem), found.search.value
    if problem.objective == "step-time":
        least = replace(problem, objective="max-load", communication="none")
        return (
            max(bound, problem.microbatches * lower_bound(least))
            if problem.whole_backwards
            else bound
        )
    limit = Limit(squares=value) if problem.objective == "variance" else Limit(most=value)
    tests = min(TESTS, int(seconds * CUTS_PER_SECOND / (len(problem.units) * problem.k)))
    return crossing_bound(Instance.of(problem), limit, bound, tests)


def at_stage_ends(
    problem: Problem, assignment: Mapping[str, int], closed: Collection[Unit]
) -> set[Unit]:
    """Which of `closed` lie where a stage begins or ends: in their own stage nothing must run before, or after.

    They could lie in the stage before, or after, as far as order goes. The first stage has no end to the left and the
    last none to the right.
    """
    unit_of = {name: unit for unit in problem.units for name in unit}
    pairs = [
        (tensor.producer, name) for tensor in problem.graph.tensors for name in tensor.consumers
    ]
    within = [
        (unit_of[a], unit_of[b])
        for a, b in (*pairs, *problem.precedence)
        if unit_of[a] != unit_of[b] and assignment[a] == assignment[b]
    ]
    fed, feeding = {b for _, b in within}, {a for a, _ in within}

    def at_end(unit: Unit) -> bool:
        stage = assignment[unit[0]]
        return (stage > 0 and unit not in fed) or (stage < problem.k - 1 and unit not in feeding)

    return {names for names in closed if at_end(unit_of[names[0]])}
