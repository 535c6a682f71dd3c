"""Which stages and replicas do PipeDream's own profiles get, beside the ones that it published?

    python -m benchmarks.pipedream_planner

profiles/ has three profiles of github.com/msr-fiddle/pipedream (MIT license): VGG-16, and GNMT with
8 and 16 LSTMs. They are planned for 4 to 16 devices with 10 Gbit/s between all of them, as in
cluster A of the paper (arXiv 1806.03377); transfers and sums of gradients overlap with computing.
Published are the configurations of that repository's `runtime`, such as 15-1: fifteen replicas of a
first stage, and one second stage. Each is given its best cut; with replicas, of those in the order
of the profile.

Prints a table; writes results/pipedream_planner.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
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
# By the repository's runtime/*/models/*/gpus=*.
CASES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("vgg16", 4, (3, 1)),
    ("vgg16", 8, (7, 1)),
    ("vgg16", 16, (15, 1)),
    ("gnmt", 4, (1,) * 4),
    ("gnmt", 12, (1,) * 8 + (3, 1)),
    ("gnmt_large", 4, (1,) * 4),
    ("gnmt_large", 8, (1,) * 8),
    ("gnmt_large", 16, (1,) * 12 + (3, 1)),
)


def main() -> None:
    """Print and write the table."""
    print(
        f"{'model':10} {'devices':>7}  {'published':>17} {'ms':>6}  {'ours':>17} {'ms':>6}", end=""
    )
    print(f" {'bound':>6} {'seconds':>7}")
    rows = [_row(*case) for case in CASES]
    RESULT.write_text(json.dumps({"link": "10 Gbit/s", "rows": rows}, indent=1) + "\n")


def _row(model: str, devices: int, published: tuple[int, ...]) -> dict[str, Any]:
    """Return, and print, the slowest stage of both configurations in ms for each minibatch."""
    path, began = HERE / "profiles" / f"pipedream_{model}.txt", time.perf_counter()
    request = CutRequest(
        k=1, objective="max-load", links=LINK, communication="overlap", ranks=devices
    )
    ours = partition_over_ranks(path, request, seconds=SECONDS)
    seconds = time.perf_counter() - began
    value = _least_load(cost_graph_in(path), published)
    row = {
        "model": model,
        "devices": devices,
        "published": _named(published),
        "published_ms": round(value / 1e6, 1),
        "ours": _named(ours.replicas),
        "ours_ms": round(ours.value / 1e6, 1),
        "bound_ms": round(ours.bound / 1e6, 1),
        "seconds": round(seconds, 1),
    }
    print(
        f"{model:10} {devices:7}  {row['published']:>17} {row['published_ms']:>6}  "
        f"{row['ours']:>17} {row['ours_ms']:>6} {row['bound_ms']:>6} {seconds:7.1f}",
        flush=True,
    )
    return row


def _least_load(graph: CostGraph, replicas: Sequence[int]) -> int:
    """Return the largest load in ns of the best cut for these replicas of stages.

    Stages with replicas are cut in the order of the profile's nodes, by a dynamic program: the
    best of the first j stages, up to each node.
    """
    if set(replicas) == {1}:
        return solve(_problem(graph, len(replicas)), seconds=SECONDS).search.value
    count = len(graph.nodes)
    best = {0: 0}
    for index, number in enumerate(replicas):
        is_last = index == len(replicas) - 1
        stops = [count] if is_last else range(index + 1, count - len(replicas) + index + 2)
        best = {
            stop: min(
                max(value, _load(graph, start, stop, number))
                for start, value in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[count]


@cache
def _load(graph: CostGraph, start: int, stop: int, replicas: int) -> int:
    """Return the load in ns of a stage of these nodes; what comes before and after is one stage."""
    bounds = sorted({0, start, stop, len(graph.nodes)})
    cut = {
        node.name: sum(place >= bound for bound in bounds[1:])
        for place, node in enumerate(graph.nodes)
    }
    stage, numbers = bounds.index(start), [1] * (len(bounds) - 1)
    numbers[stage] = replicas
    return stage_loads(_problem(graph, len(numbers)), cut, numbers)[stage]


@cache
def _problem(graph: CostGraph, k: int) -> PartitionProblem:
    return PartitionProblem(graph, k, objective="max-load", communication="overlap", links=LINK)


def _named(replicas: Sequence[int]) -> str:
    """Return the replicas of the stages as PipeDream's paper writes them."""
    return (
        "straight" if set(replicas) == {1} and len(replicas) > 1 else "-".join(map(str, replicas))
    )


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
