"""The partitioner: from a problem to a cut, with a bound that says how good it is.

`planner` and `api/partition_file.py` call `solve`. Below it, imports go one way:

    solver ─▶ multilevel_solver ─▶ flat_solver ─▶ search
    search ─▶ prefix_cuts, lattice, min_cut_bound, cpsat
"""

from __future__ import annotations

from pipecompile.partition.budget import SECONDS
from pipecompile.partition.flat_solver import solve_flat
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition

__all__ = ["solve"]


def solve(
    problem: PartitionProblem, *, seconds: float = SECONDS, explained: bool = True
) -> Partition:
    """Return the best cut that about `seconds` of work find, with a lower bound.

    The budget is counted in steps of work and not in seconds, so the same input gives the same
    output.

    Raise InfeasibleError if there is no cut. It says which constraint cannot be met, where, and by
    how much, if that is to be `explained`, which may take longer than the search.
    """
    if problem.granularity == "auto":
        # Imported where it is needed: it brings in OR-tools, which takes a second to load.
        from pipecompile.partition.multilevel_solver import solve_multilevel

        return solve_multilevel(problem, seconds, explained=explained)[0]
    return solve_flat(problem, seconds=seconds, explained=explained)
