"""What a partitioner answers."""

from __future__ import annotations

from dataclasses import dataclass

from pipecompile.ir.plan import Search
from pipecompile.partition.objective import lower_bound, measures, objective_value, stage_loads
from pipecompile.partition.problem import Problem

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """The stage of each node; `cuts` are the first positions of stages 1 … k − 1 in the order that was cut.

    `search.values` holds the objectives' values under the names of the partition result: `max_load_ns`,
    `sum_of_squares_ns2` and `variance_ns2`.
    """

    assignment: dict[str, int]
    cuts: tuple[int, ...]
    loads_ns: tuple[int, ...]
    search: Search

    @staticmethod
    def of(
        problem: Problem, assignment: dict[str, int], cuts: tuple[int, ...], *, method: str, best: bool
    ) -> Partition:
        """Scores an assignment from the graph alone; `best` tells that the method proves that none is better."""
        loads = stage_loads(problem, assignment)
        value = objective_value(problem.objective, loads)
        bound = value if best else lower_bound(problem)
        search = Search(
            objective=problem.objective,
            method=method,
            value=value,
            bound=bound,
            gap=(value - bound) / value if value else 0.0,
            proven=value == bound,
            values=measures(loads),
        )
        return Partition(assignment, cuts, loads, search)
