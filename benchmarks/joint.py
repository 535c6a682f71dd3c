"""Cuts and recompute chosen together, against every cut with every choice of regions, on graphs of up to 12 nodes.

As tests/api/test_joint.py, on more and larger graphs: random ones of 8 to 12 nodes with skips, views and tied
parameters, two stages, a budget between the least and the most that any stage holds. Prints how many were equal and
writes benchmarks/results/joint.json.

    python -m benchmarks.joint [GRAPHS]         (default 20)
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph
from tests.api.test_joint import compared
from tests.ir.cost_graphs import cost_graphs

RESULT = Path(__file__).parent / "results" / "joint.json"
GRAPHS, LEAST, MOST = 20, 8, 12


def swept(graphs: int) -> tuple[Counter[int], Counter[str]]:
    """How many graphs of each size, and how many outcomes of each kind; an AssertionError where any differs."""
    sizes, outcomes = Counter[int](), Counter[str]()

    @seed(0)
    @settings(
        max_examples=graphs,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(cost_graphs(MOST, least=LEAST), st.sampled_from(["1f1b", "gpipe"]), st.floats(0, 1))
    def one(graph: CostGraph, schedule: str, share: float) -> None:
        began = time.perf_counter()
        outcome = compared(graph, schedule, share)
        sizes[len(graph.nodes)] += 1
        outcomes[outcome] += 1
        print(
            f"{len(graph.nodes)} nodes: {outcome}, {time.perf_counter() - began:.1f} s", flush=True
        )

    run: Callable[[], None] = one
    run()
    return sizes, outcomes


def main() -> None:
    """As the module says."""
    began = time.perf_counter()
    sizes, outcomes = swept(int(sys.argv[1]) if len(sys.argv) > 1 else GRAPHS)
    result = {
        "graphs_by_nodes": {str(size): sizes[size] for size in sorted(sizes)},
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(time.perf_counter() - began, 1),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
