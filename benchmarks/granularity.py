"""What does it cost to cut between modules or blocks only, and how much of that does opening a few blocks save?

k = 4, free links: a plan's own setting. Costs are counted (`flops`), the same on every machine: the question is how
finely time is spread over a model's tree, for which they are as good as measured ones. Prints for each level the units
that it leaves (for `auto`: in the last search), imbalance and the gap to the bound, and writes
benchmarks/results/granularity.json.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples import models
from pipecompile.api.capture import capture_target
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.partition_problem import problem_of
from pipecompile.api.target import Target
from pipecompile.ir.links import FREE
from pipecompile.ir.plan import GRANULARITIES
from pipecompile.partition.multilevel import solve_multilevel, with_groups
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

NAMES = ("gpt2", "gpt2_small", "bert", "llama", "resnet50", "t5", "unet")
RESULT = Path(__file__).parent / "results" / "granularity.json"
STAGES = 4
SECONDS = 10.0  # of work, as a plan has


def main() -> None:
    """Prints and writes the table."""
    torch.set_num_threads(1)
    print(
        f"{'model':12} {'cut between':12} {'units':>6} {'imbalance':>9} {'at least':>9} {'gap':>8}  proof"
    )
    rows = [row for name in NAMES for row in measure(name)]
    RESULT.write_text(
        json.dumps({"torch": torch.__version__, "k": STAGES, "rows": rows}, indent=1) + "\n"
    )


def measure(name: str) -> list[dict[str, Any]]:
    """One model at every granularity."""
    target = Target.of(getattr(models, name)(), name)
    options = options_for(target, k=STAGES, costs="flops")
    graph = cost_graph(
        target, options.costs, options.microbatches, capture_target(target, options, verify=True)
    )
    asked = problem_of(graph, options, FREE)
    return [_row(name, replace(asked, granularity=granularity)) for granularity in GRANULARITIES]


def _row(name: str, problem: PartitionProblem) -> dict[str, Any]:
    began = time.perf_counter()
    found, units = _solved(problem)
    seconds = time.perf_counter() - began
    loads, search = found.loads_ns, found.search
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
        f"{name:12} {problem.granularity:12} {units:6} {row['imbalance']:9.3f} {row['imbalance_of_bound']:9.3f} "
        f"{search.gap:8.3%}  {proof}",
        flush=True,
    )
    return row


def _solved(problem: PartitionProblem) -> tuple[Partition, int]:
    """The cut, and how many units the last search was among."""
    if problem.granularity != "auto":
        return solve(problem, seconds=SECONDS), len(problem.units)
    found, closed = solve_multilevel(problem, SECONDS)
    return found, len(with_groups(problem, closed).units)


def _imbalance(problem: PartitionProblem) -> float:
    """No cut at this level has a smaller largest load / mean load than the best for the largest load."""
    bound = solve(replace(problem, objective="max-load")).search.bound
    return bound * problem.k / max(1, problem.compute_ns(problem.graph.by_name, last=True))


if __name__ == "__main__":
    main()
