"""Where graphs are too large for a tight bound: what do full-size methods find with a minute each?

Captured models of about 10,000 nodes, largest load, transfers at 16 GB/s. Ours has its usual budget of 10 s of work;
the linear dynamic program over ever new orders, and CP-SAT on the whole graph from the best single order, have 60 s
each. Prints a table and writes benchmarks/results/partition_rivals.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost_graphs import deep
from benchmarks.partition import LINK, SECONDS
from pipecompile.partition.cpsat import COARSE, solve_integer_program
from pipecompile.partition.objective import objective_value, stage_loads
from pipecompile.partition.orders import shuffled_order, topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.pricing import Pricing
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.windows import Limit

RESULT = Path(__file__).parent / "results" / "partition_rivals.json"
CASES = [(kind, 10_000, k) for kind in ("llama", "gpt2") for k in (8, 64)]
MINUTE = 60.0
Stages = tuple[int, ...]


def main() -> None:
    """Prints and writes the table."""
    print(
        f"{'':8} {'nodes':>6} {'k':>3} {'bound':>10} {'ours':>7} {'seconds':>8} {'linear':>7} {'cp-sat':>7}"
    )
    rows = [compare(*case) for case in CASES]
    RESULT.write_text(
        json.dumps({"seconds_allowed": [SECONDS, MINUTE, MINUTE], "rows": rows}, indent=1) + "\n"
    )
    worst = max(row["ours"] / min(row["linear"], row["cp-sat"]) for row in rows)
    print(f"ours over the better of the two, at worst: {worst:.4f}")


def compare(kind: str, nodes: int, k: int) -> dict[str, Any]:
    """Ours and both rivals on one graph, as ratios to the bound."""
    problem = PartitionProblem(deep(kind, nodes), k, objective="max-load", links=LINK)
    began = time.perf_counter()
    found = solve(problem, seconds=SECONDS).search
    seconds = time.perf_counter() - began
    unit_graph = UnitGraph.of(problem)
    first = _cut(unit_graph, next(iter(topological_orders(unit_graph))), Limit())
    assert first is not None
    values = {"linear": _multistart(unit_graph, first), "cp-sat": _integer(unit_graph, first)}
    ratios = {
        name: round(value / found.bound, 4)
        for name, value in {"ours": found.value, **values}.items()
    }
    row = {"kind": kind, "nodes": len(problem.graph.nodes), "k": k, "bound": found.bound, **ratios}
    print(
        f"{kind:8} {row['nodes']:6} {k:3} {found.bound:10.4g} {ratios['ours']:7.3f} {seconds:8.1f} "
        f"{ratios['linear']:7.3f} {ratios['cp-sat']:7.3f}",
        flush=True,
    )
    return row | {"seconds": round(seconds, 1)}


def _multistart(unit_graph: UnitGraph, first: Stages) -> int:
    """The best of all orders that fit into a minute: the fixed ones, then shuffles inside the best stages so far."""
    best, random, began, fixed = (
        first,
        np.random.default_rng(0),
        time.perf_counter(),
        topological_orders(unit_graph),
    )
    while time.perf_counter() - began < MINUTE:
        order = next(fixed, None) or shuffled_order(unit_graph, best, random)
        best = _cut(unit_graph, order, Limit(most=_value(unit_graph, best))) or best
    return _value(unit_graph, best)


def _cut(unit_graph: UnitGraph, order: list[int], limit: Limit) -> Stages | None:
    found = cut_order(Prefixes(unit_graph, order), limit, Pricing(unit_graph.problem, 0).best)
    if found is None:
        return None
    stages = np.zeros(unit_graph.count, np.intp)
    stages[order] = np.searchsorted(found.rows[1:-1], np.arange(unit_graph.count), side="right")
    return tuple(stages.tolist())


def _integer(unit_graph: UnitGraph, first: Stages) -> int:
    """CP-SAT in a deterministic budget that takes it about a minute."""
    limit = Limit(most=_value(unit_graph, first))
    answer = solve_integer_program(unit_graph, first, limit, MINUTE / 3, COARSE)
    return min(_value(unit_graph, answer.stages or first), _value(unit_graph, first))


def _value(unit_graph: UnitGraph, stages: Stages) -> int:
    return objective_value(
        "max-load", stage_loads(unit_graph.problem, unit_graph.assignment(stages))
    )


if __name__ == "__main__":
    main()
