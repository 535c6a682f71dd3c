"""What do other methods find in a minute on graphs that are too large for a tight lower bound?

    python -m benchmarks.partition_rivals

The graphs are captured models of about 10,000 nodes; the objective is the largest load, with
transfers at 16 GB/s. pipecompile has its usual budget of 10 s of work. Two rivals have 60 s each:
the dynamic program over intervals of one order after another, and CP-SAT on the whole graph,
started from the best single order.

Prints a table; writes results/partition_rivals.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import no_arguments
from benchmarks.cost_graphs import deep_graph
from benchmarks.partition import LINK, SECONDS
from pipecompile.partition.cpsat import COARSE, solve_integer_program
from pipecompile.partition.objective import objective_value, stage_loads
from pipecompile.partition.orders import shuffled_order, topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.windows import Limit

RESULT = Path(__file__).parent / "results" / "partition_rivals.json"
CASES = [(kind, 10_000, k) for kind in ("llama", "gpt2") for k in (8, 64)]
RIVAL_SECONDS = 60.0
Stages = tuple[int, ...]


def main() -> None:
    """Print and write the table."""
    print(f"{'':8} {'nodes':>6} {'k':>3} {'bound':>10} {'ours':>7} {'seconds':>8}", end=" ")
    print(f"{'linear':>7} {'cp-sat':>7}")
    rows = [compare(*case) for case in CASES]
    RESULT.write_text(
        json.dumps(
            {"seconds_allowed": [SECONDS, RIVAL_SECONDS, RIVAL_SECONDS], "rows": rows}, indent=1
        )
        + "\n"
    )
    worst = max(row["ours"] / min(row["linear"], row["cp-sat"]) for row in rows)
    print(f"ours over the better of the two, at worst: {worst:.4f}")


def compare(kind: str, nodes: int, k: int) -> dict[str, Any]:
    """Return what pipecompile and both rivals find on one graph, as ratios to the bound."""
    problem = PartitionProblem(deep_graph(kind, nodes), k, objective="max-load", links=LINK)
    began = time.perf_counter()
    search = solve(problem, seconds=SECONDS).search
    seconds = time.perf_counter() - began
    unit_graph = UnitGraph.of(problem)
    first = _cut(unit_graph, next(iter(topological_orders(unit_graph))), Limit())
    assert first is not None
    values = {
        "linear": _best_of_many_orders(unit_graph, first),
        "cp-sat": _solved_by_cpsat(unit_graph, first),
    }
    ratios = {
        name: round(value / search.bound, 4)
        for name, value in {"ours": search.value, **values}.items()
    }
    row = {"kind": kind, "nodes": len(problem.graph.nodes), "k": k, "bound": search.bound, **ratios}
    print(
        f"{kind:8} {row['nodes']:6} {k:3} {search.bound:10.4g} {ratios['ours']:7.3f} "
        f"{seconds:8.1f} {ratios['linear']:7.3f} {ratios['cp-sat']:7.3f}",
        flush=True,
    )
    return row | {"seconds": round(seconds, 1)}


def _best_of_many_orders(unit_graph: UnitGraph, first: Stages) -> int:
    """Return the value of the best cut along any order that a minute is enough for.

    The fixed orders come first, then shuffles of the nodes inside the best stages so far.
    """
    best, fixed = first, topological_orders(unit_graph)
    random = np.random.default_rng(0)
    began = time.perf_counter()
    while time.perf_counter() - began < RIVAL_SECONDS:
        order = next(fixed, None) or shuffled_order(unit_graph, best, random)
        best = _cut(unit_graph, order, Limit(most=_value(unit_graph, best))) or best
    return _value(unit_graph, best)


def _cut(unit_graph: UnitGraph, order: list[int], limit: Limit) -> Stages | None:
    cut = cut_order(Prefixes(unit_graph, order), limit, PricedSearch(unit_graph.problem, 0).best)
    if cut is None:
        return None
    stages = np.zeros(unit_graph.count, np.intp)
    stages[order] = np.searchsorted(cut.rows[1:-1], np.arange(unit_graph.count), side="right")
    return tuple(stages.tolist())


def _solved_by_cpsat(unit_graph: UnitGraph, first: Stages) -> int:
    """Return the value of the best cut that CP-SAT finds in about a minute."""
    # Its budget is deterministic time, of which a machine does about 20 s in a minute.
    limit = Limit(most=_value(unit_graph, first))
    answer = solve_integer_program(unit_graph, first, limit, RIVAL_SECONDS / 3, COARSE)
    return min(_value(unit_graph, answer.stages or first), _value(unit_graph, first))


def _value(unit_graph: UnitGraph, stages: Stages) -> int:
    return objective_value(
        "max-load", stage_loads(unit_graph.problem, unit_graph.assignment(stages))
    )


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
