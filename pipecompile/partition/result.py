"""The partitioner's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipecompile.ir.plan import Search
from pipecompile.partition.objective import measures, objective_value, rank_loads, stage_loads
from pipecompile.partition.problem import PartitionProblem

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """The stage of each node, what each rank takes, and how good the cut is.

    `loads_with_transfers_ns` are what the objectives measure, per rank: the load (forward, backward
    and recompute of one microbatch), what stages pay to fit their memory, and the transfers that
    the problem's communication charges.

    `replicas` is the number of data-parallel ranks of each stage. `search.values` has the
    objectives' values by name: `max_load_ns`, `sum_of_squares_ns2` and `variance_ns2`.
    """

    assignment: dict[str, int]
    loads_with_transfers_ns: tuple[int, ...]
    replicas: tuple[int, ...]
    search: Search

    @staticmethod
    def of(
        problem: PartitionProblem,
        assignment: Mapping[str, int],
        *,
        method: str,
        bound: int,
        extra_ns: Mapping[int, int] | None = None,
        replicas: tuple[int, ...] | None = None,
    ) -> Partition:
        """Return the result for an assignment, scored from the graph alone.

        `extra_ns` is what stages pay per microbatch to fit their memory, `bound` a lower bound of
        the objective.
        """
        extra = extra_ns or {}
        loads = stage_loads(problem, assignment, replicas)
        loads = tuple(load + extra.get(stage, 0) for stage, load in enumerate(loads))
        loads = rank_loads(problem, loads)
        if problem.objective == "step-time":
            assert problem.step_ns is not None
            value = problem.step_ns(assignment)
        else:
            value = objective_value(problem.objective, loads)
        # One stage can be cut in one way only.
        bound = value if problem.k == 1 and not extra else bound
        # A bound above the value of a cut would be a false proof.
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
        # In the order of the graph, so that equal cuts are written with equal bytes.
        ordered = {node.name: assignment[node.name] for node in problem.graph.nodes}
        return Partition(ordered, loads, replicas or (1,) * problem.k, search)
