"""Are cut and recompute, chosen together, as good as the best of all cuts with all regions?

    python -m benchmarks.joint [GRAPHS]         (default 20)

This is tests/api/test_joint.py on more and larger graphs: random ones of 8 to 12 nodes with skips,
views and tied parameters, in two stages, with a cap between the least and the most that any
stage holds. Brute force finds the best choice.

Prints the outcome of each graph and stops at the first one that differs; writes results/joint.json.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.command_line import parser_of
from pipecompile.ir.graph import CostGraph
from tests.api.test_joint import compared
from tests.ir.cost_graphs import cost_graphs

RESULT = Path(__file__).parent / "results" / "joint.json"
GRAPHS, LEAST_NODES, MOST_NODES = 20, 8, 12


def sweep(graphs: int) -> tuple[Counter[int], Counter[str]]:
    """Return the number of graphs by size, and the number of outcomes by kind.

    AssertionError if the plan of a graph is not the best one.
    """
    sizes, outcomes = Counter[int](), Counter[str]()

    @seed(0)
    @settings(
        max_examples=graphs,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(
        cost_graphs(MOST_NODES, least=LEAST_NODES),
        st.sampled_from(["1f1b", "gpipe"]),
        st.floats(0, 1),
    )
    def compare_one(graph: CostGraph, schedule: str, share: float) -> None:
        began = time.perf_counter()
        outcome = compared(graph, schedule, share)
        sizes[len(graph.nodes)] += 1
        outcomes[outcome] += 1
        print(
            f"{len(graph.nodes)} nodes: {outcome}, {time.perf_counter() - began:.1f} s", flush=True
        )

    run: Callable[[], None] = compare_one
    run()
    return sizes, outcomes


def main(graphs: int) -> None:
    """Print and write the outcomes."""
    began = time.perf_counter()
    sizes, outcomes = sweep(graphs)
    result = {
        "graphs_by_nodes": {str(size): sizes[size] for size in sorted(sizes)},
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(time.perf_counter() - began, 1),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("graphs", nargs="?", type=int, default=GRAPHS)
    main(parser.parse_args().graphs)
