"""What a partitioner answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipecompile.ir.plan import Search
from pipecompile.partition.objective import measures, objective_value, rank_loads, stage_loads
from pipecompile.partition.problem import Problem

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """The stage of each node, the load of each stage, and how good that is.

    `loads_ns` are those of ranks, which the objectives measure: with one stage a rank, of the stages. `replicas` is
    the number of data-parallel ranks of each stage. `search.values` holds the objectives' values under the names of
    the partition result: `max_load_ns`, `sum_of_squares_ns2` and `variance_ns2`.
    """

    assignment: dict[str, int]
    loads_ns: tuple[int, ...]
    replicas: tuple[int, ...]
    search: Search

    @staticmethod
    def of(
        problem: Problem,
        assignment: Mapping[str, int],
        *,
        method: str,
        bound: int,
        extra_ns: Mapping[int, int] | None = None,
        replicas: tuple[int, ...] | None = None,
    ) -> Partition:
        """Scores an assignment from the graph alone; `extra_ns` is what stages pay to fit their memory."""
        stages = stage_loads(problem, assignment, replicas)
        stages = tuple(load + (extra_ns or {}).get(stage, 0) for stage, load in enumerate(stages))
        loads = rank_loads(problem, stages)
        if problem.objective == "step-time":
            assert problem.step_ns is not None
            value = problem.step_ns(assignment)
        else:
            value = objective_value(problem.objective, loads)
        assert bound <= value, f"the bound {bound} is above the value {value} that was found"
        search = Search(
            objective=problem.objective,
            method=method,
            value=value,
            bound=bound,
            gap=(value - bound) / value if value else 0.0,
            proven=value == bound,
            values=measures(loads),
        )
        ordered = {node.name: assignment[node.name] for node in problem.graph.nodes}
        return Partition(ordered, loads, replicas or (1,) * problem.k, search)
