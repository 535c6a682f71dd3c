"""Cuts by other objectives than the one that was asked for, compared by the simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.plan import Faster
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

__all__ = ["alternative_cuts", "fastest_alternative"]


def fastest_alternative(
    problem: PartitionProblem,
    objectives: Iterable[str],
    step_ns: Callable[[Mapping[str, int]], int],
    *,
    seconds: float,
) -> Faster | None:
    """Return the objective whose cut has the shortest step, and that step; None without a cut.

    `step_ns` is that of an assignment. Each objective is searched for about `seconds`. That a short
    search finds no cut does not mean that there is none.
    """
    alternatives = [
        Faster(objective=cut.search.objective, step_ns=step_ns(cut.assignment))
        for cut in alternative_cuts(problem, objectives, seconds=seconds)
    ]
    return min(alternatives, key=lambda other: other.step_ns, default=None)


def alternative_cuts(
    problem: PartitionProblem, objectives: Iterable[str], *, seconds: float
) -> Iterator[Partition]:
    """Yield the cut by each objective for which about `seconds` of work find one."""
    for objective in objectives:
        with suppress(InfeasibleError):
            yield solve(replace(problem, objective=objective), seconds=seconds, explained=False)
