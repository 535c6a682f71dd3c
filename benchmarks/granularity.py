"""What does it cost to cut only between modules or blocks, and how much of it does `auto` save?

    python -m benchmarks.granularity

Four stages and free links, as a plan has them by default. Costs are counted (`flops`), which are
the same on every machine: the question is how finely time is spread over a model's modules, for
which they are as good as measured ones.

Prints for each granularity the units (for `auto`, those of its last search), the imbalance and the
gap to the lower bound; writes results/granularity.json.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import no_arguments
from examples import models
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import GRANULARITIES
from pipecompile.partition.multilevel_solver import solve_multilevel, with_groups
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from pipecompile.planner.partition_problem import problem_of

NAMES = ("gpt2", "gpt2_small", "bert", "llama", "resnet50", "t5", "unet")
RESULT = Path(__file__).parent / "results" / "granularity.json"
STAGES = 4
SECONDS = 10.0  # of work, which is what a plan takes too


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    print(f"{'model':12} {'cut between':12} {'units':>6} {'imbalance':>9}", end=" ")
    print(f"{'at least':>9} {'gap':>8}  proof")
    rows = [row for name in NAMES for row in measure(name)]
    RESULT.write_text(
        json.dumps({"torch": torch.__version__, "k": STAGES, "rows": rows}, indent=1) + "\n"
    )


def measure(name: str) -> list[dict[str, Any]]:
    """Return a row for each granularity of one model."""
    target = Target.of(getattr(models, name)(), name)
    options = options_for(target, k=STAGES, costs="flops")
    graph = cost_graph(
        target, options.costs, options.microbatches, capture_target(target, options, verify=True)
    )
    problem = problem_of(graph, options, FREE)
    return [_row(name, replace(problem, granularity=granularity)) for granularity in GRANULARITIES]


def _row(name: str, problem: PartitionProblem) -> dict[str, Any]:
    began = time.perf_counter()
    partition, units = _solved(problem)
    seconds = time.perf_counter() - began
    loads, search = partition.loads_with_transfers_ns, partition.search
    row = {
        "model": name,
        "cut_between": problem.granularity,
        "units": units,
        "imbalance": round(max(loads) * len(loads) / sum(loads), 4),
        "imbalance_of_bound": round(_imbalance(problem), 4),
        "gap": search.gap,
        "proven": search.proven,
        "method": search.method,
        "seconds": round(seconds, 2),
    }
    proof = f"{'proven' if search.proven else 'not proven'} ({search.method}, {seconds:.2f} s)"
    print(
        f"{name:12} {problem.granularity:12} {units:6} {row['imbalance']:9.3f} "
        f"{row['imbalance_of_bound']:9.3f} {search.gap:8.3%}  {proof}",
        flush=True,
    )
    return row


def _solved(problem: PartitionProblem) -> tuple[Partition, int]:
    """Return the cut and the number of units in the search that found it."""
    if problem.granularity != "auto":
        return solve(problem, seconds=SECONDS), len(problem.units)
    partition, closed_groups = solve_multilevel(problem, SECONDS)
    return partition, len(with_groups(problem, closed_groups).units)


def _imbalance(problem: PartitionProblem) -> float:
    """Return a lower bound on the imbalance (largest load / mean load) of all cuts of `problem`.

    It is the bound for the objective `max-load`, whatever objective the problem itself has.
    """
    bound = solve(replace(problem, objective="max-load")).search.bound
    return bound * problem.k / max(1, problem.compute_ns(problem.graph.by_name, last=True))


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
