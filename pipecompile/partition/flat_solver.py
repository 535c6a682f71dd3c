"""Solves a problem at one granularity, for any objective.

"Flat" is the opposite of multilevel: `multilevel_solver` solves several of these problems one after
the other.

Variance and max-load are sums and maxima over stages, so that dynamic programs can add stage by
stage. The simulated step is neither. Its search starts from the cuts of the other objectives, and
moves nodes as long as the simulated step becomes shorter.
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.partition.budget import ACTIONS_PER_SECOND
from pipecompile.partition.local_search import climb
from pipecompile.partition.objective import lower_bound, step_of_load
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.search import PartitionSearch
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.violations import violations

__all__ = ["solve_flat"]


def solve_flat(problem: PartitionProblem, *, seconds: float, explained: bool) -> Partition:
    """Return the best cut that is found, with a bound.

    Granularity "auto" is taken as "operators". Raise InfeasibleError, `explained` or not, if no cut
    is found.
    """
    if problem.objective == "step-time":
        return _solve_step_time(problem, seconds, explained)
    search = PartitionSearch(UnitGraph.of(problem), seconds)
    search.run()
    return search.result(explained)


def _solve_step_time(problem: PartitionProblem, seconds: float, explained: bool) -> Partition:
    """Return the cut of the shortest simulated step that hill climbing finds.

    It starts from the best of the other objectives' cuts.
    """
    assert problem.step_ns is not None
    step_ns = problem.step_ns
    cuts = [
        solve_flat(
            replace(problem, objective=objective, communication=communication, step_ns=None),
            seconds=seconds / 4,
            explained=explained,
        )
        for objective, communication in (
            ("variance", problem.communication),
            ("max-load", problem.communication),
            ("max-load", "none"),
        )
    ]
    bound = lower_bound(problem)
    if problem.whole_backwards:
        # Some rank computes M times the largest compute, whatever the schedule does meanwhile.
        bound = max(bound, step_of_load(problem, cuts[-1].search.bound))
    # The cut without transfers may be better where they hide behind compute.
    best = min(cuts, key=lambda cut: step_ns(cut.assignment)).assignment

    unit_graph = UnitGraph.of(problem)

    def value(stages: tuple[int, ...]) -> int | None:
        assignment = unit_graph.assignment(stages)
        return None if next(violations(problem, assignment), None) else step_ns(assignment)

    evaluations = int(seconds * ACTIONS_PER_SECOND / (problem.k * problem.microbatches))
    stages = climb(unit_graph, [best[unit[0]] for unit in unit_graph.units], value, evaluations)
    return Partition.of(problem, unit_graph.assignment(stages), method="linear-dp", bound=bound)
