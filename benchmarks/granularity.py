"""What does it cost to cut between blocks only? Measured costs, k = 4, free links: the plan's own setting.

The graph is cut between operators, and again with the nodes of each block (h.0, layer1.2, …) kept together. Prints
imbalance and the gap to the bound for both and writes benchmarks/results/granularity.json.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples import models
from pipecompile.api.compile import capture_target, options_for
from pipecompile.api.costing import cost_graph
from pipecompile.api.cutting import problem_of
from pipecompile.api.target import Target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE
from pipecompile.ir.modules import block_of
from pipecompile.partition.front import solve
from pipecompile.partition.problem import Problem

NAMES = ("gpt2", "gpt2_small", "resnet50", "t5", "unet")
RESULT = Path(__file__).parent / "results" / "granularity.json"
STAGES = 4


def main() -> None:
    """Prints and writes the table."""
    torch.set_num_threads(1)
    print(f"{'model':12} {'cut between':12} {'units':>6} {'imbalance':>9} {'at least':>9} {'gap':>8}  proof")
    rows = [row for name in NAMES for row in measure(name)]
    RESULT.write_text(json.dumps({"torch": torch.__version__, "k": STAGES, "rows": rows}, indent=1) + "\n")


def measure(name: str) -> list[dict[str, Any]]:
    """One model at both granularities."""
    target = Target.of(getattr(models, name)(), name)
    options = options_for(target, k=STAGES, costs="measured")
    graph = cost_graph(target, options.costs, options.microbatches, capture_target(target, options, verify=True))
    cuts = {"operators": (), "blocks": blocks(graph)}
    asked = problem_of(graph, options, FREE)
    return [_row(name, kind, replace(asked, together=together)) for kind, together in cuts.items()]


def blocks(graph: CostGraph) -> tuple[tuple[str, ...], ...]:
    """The nodes of each block; those outside any stay as they are."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if block_of(node.module) != node.module or node.module[-1:].isdigit():
            found.setdefault(block_of(node.module), []).append(node.name)
    return tuple(tuple(names) for names in found.values())


def _row(name: str, kind: str, problem: Problem) -> dict[str, Any]:
    began = time.perf_counter()
    found = solve(problem)
    loads, search = found.loads_ns, found.search
    row = {
        "model": name,
        "cut_between": kind,
        "units": len(problem.units),
        "imbalance": round(max(loads) * len(loads) / sum(loads), 4),
        "imbalance_of_bound": round(_imbalance(problem), 4),
        "gap": search.gap,
        "proven": search.proven,
        "method": search.method,
    }
    proof = f"{'proven' if search.proven else 'not proven'} ({search.method}, {time.perf_counter() - began:.1f} s)"
    print(
        f"{name:12} {kind:12} {row['units']:6} {row['imbalance']:9.3f} {row['imbalance_of_bound']:9.3f} "
        f"{search.gap:8.3%}  {proof}",
        flush=True,
    )
    return row


def _imbalance(problem: Problem) -> float:
    """No cut between these units has a smaller largest load / mean load than the best for the largest load."""
    bound = solve(replace(problem, objective="max-load")).search.bound
    return bound * problem.k / max(1, problem.compute_ns(problem.graph.by_name, last=True))


if __name__ == "__main__":
    main()
