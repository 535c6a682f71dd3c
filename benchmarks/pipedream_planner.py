"""Which stages and replicas do PipeDream's own profiles get, beside the ones that it published?

    python -m benchmarks.pipedream_planner

profiles/ has two profiles of github.com/msr-fiddle/pipedream (MIT license): VGG-16 and GNMT. They
are planned for 4 to 16 devices with 10 Gbit/s between all of them, as in cluster A of the paper
(arXiv 1806.03377); transfers and sums of gradients overlap with computing. Published are the
configurations of that repository's `runtime`, such as 15-1: fifteen replicas of a first stage, and
one second stage. Each is given its best cut, where that can be searched here: two stages, or one
rank for each.

Prints a table; writes results/pipedream_planner.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import no_arguments
from pipecompile.api.partition_file import CutRequest, partition_over_ranks
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.pipedream_profile import cost_graph_in
from pipecompile.partition.objective import stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve

HERE = Path(__file__).parent
RESULT = HERE / "results" / "pipedream_planner.json"
LINK = Links(bandwidth_bytes_per_s=1_250_000_000, latency_ns=0)
SECONDS = 60.0
# By the repository's runtime/*/models/*/gpus=*: None where it has no configuration.
CASES: tuple[tuple[str, int, tuple[int, ...] | None], ...] = (
    ("vgg16", 4, (3, 1)),
    ("vgg16", 8, (7, 1)),
    ("vgg16", 16, (15, 1)),
    ("gnmt", 4, (1,) * 4),
    ("gnmt", 8, None),
    ("gnmt", 12, (1,) * 8 + (3, 1)),
    ("gnmt", 16, None),
)


def main() -> None:
    """Print and write the table."""
    print(
        f"{'model':6} {'devices':>7}  {'published':>17} {'ms':>6}  {'ours':>17} {'ms':>6}", end=""
    )
    print(f" {'bound':>6} {'seconds':>7}")
    rows = [_row(*case) for case in CASES]
    RESULT.write_text(json.dumps({"link": "10 Gbit/s", "rows": rows}, indent=1) + "\n")


def _row(model: str, devices: int, published: tuple[int, ...] | None) -> dict[str, Any]:
    """Return, and print, the slowest stage of both configurations in ms for each minibatch."""
    path, began = HERE / "profiles" / f"pipedream_{model}.txt", time.perf_counter()
    request = CutRequest(
        k=1, objective="max-load", links=LINK, communication="overlap", ranks=devices
    )
    ours = partition_over_ranks(path, request, seconds=SECONDS)
    seconds = time.perf_counter() - began
    value = None if published is None else _least_load(cost_graph_in(path), published)
    row = {
        "model": model,
        "devices": devices,
        "published": _named(published),
        "published_ms": None if value is None else round(value / 1e6, 1),
        "ours": _named(ours.replicas),
        "ours_ms": round(ours.value / 1e6, 1),
        "bound_ms": round(ours.bound / 1e6, 1),
        "seconds": round(seconds, 1),
    }
    print(
        f"{model:6} {devices:7}  {row['published']:>17} {row['published_ms'] or '–':>6}  "
        f"{row['ours']:>17} {row['ours_ms']:>6} {row['bound_ms']:>6} {seconds:7.1f}",
        flush=True,
    )
    return row


def _least_load(graph: CostGraph, replicas: Sequence[int]) -> int | None:
    """Return the largest load in ns of the best cut for these replicas; None if not searched."""
    problem = PartitionProblem(
        graph, len(replicas), objective="max-load", communication="overlap", links=LINK
    )
    if set(replicas) == {1}:
        return solve(problem, seconds=SECONDS).search.value
    if len(replicas) > 2:
        return None
    names = [node.name for node in graph.nodes]
    cuts = (
        {name: int(index >= first) for index, name in enumerate(names)}
        for first in range(1, len(names))
    )
    return min(max(stage_loads(problem, cut, replicas)) for cut in cuts)


def _named(replicas: Sequence[int] | None) -> str:
    """Return the replicas of the stages as PipeDream's paper writes them."""
    if replicas is None:
        return "–"
    return (
        "straight" if set(replicas) == {1} and len(replicas) > 1 else "-".join(map(str, replicas))
    )


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
