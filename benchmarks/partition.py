"""How good are pipecompile's cuts, how do those of other tools compare, and how long do they take?

    python -m benchmarks.partition [GROUP …]     instances, captured, synthetic or scale

The same evaluator scores all cuts in the same run, as a ratio to the best lower bound that is
known. A cell is `-` where a partitioner finds no cut and `memory` where its cut does not fit. The
run fails if a cut of pipecompile is worse than another one.

Prints a table for each group and objective; writes results/partition.json. Groups that are not run
keep their figures.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.baselines import BASELINES, Assignment, has_torchgpipe
from benchmarks.command_line import chosen_names
from benchmarks.cost_graphs import (
    FAMILIES,
    MODELS,
    captured_graph,
    deep_graph,
    synthetic_graph,
)
from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links
from pipecompile.ir.serialization import read
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.objective import objective_value, rank_loads, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve
from pipecompile.partition.violations import violations

INSTANCES = Path(__file__).parents[2] / "shared" / "instances" / "placement"
RESULT = Path(__file__).parent / "results" / "partition.json"
LINK = Links.of(Link(bandwidth_bytes_per_s=16 * 10**9))
SECONDS = 10.0
STAGES = (2, 4, 8, 16)
SIZES = (50, 300)  # of synthetic graphs
SCALE = (
    *(("llama", nodes) for nodes in (1000, 2000, 5000, 10_000)),
    ("gpt2", 10_000),
    *(("moe", nodes) for nodes in (1000, 2000, 5000, 10_000, 50_000)),
)
SCALE_STAGES = (8, 64)
OBJECTIVES = {"max-load": "the largest load", "variance": "the sum of squared loads"}

Row = dict[str, Any]
T = TypeVar("T")


def main(names: list[str]) -> None:
    """Print and write the tables of these groups, or of all."""
    groups = names or [*CASES, "scale"]
    if not has_torchgpipe():
        print("torchgpipe is not installed, so its column is empty: pip install torchgpipe")
        del BASELINES["torchgpipe"]
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "seconds_allowed": SECONDS,
    }
    for name in groups:
        result[name] = scale() if name == "scale" else compare_all(name, list(CASES[name]()))
        RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    worse = [text for name in groups for row in result[name] for text in row.get("violations", ())]
    if worse:
        raise SystemExit("\n".join(["these cuts are worse than others:", *worse]))


def instances() -> Iterator[tuple[str, PartitionProblem, int]]:
    """Yield the published placement problems, each with its best known largest load."""
    known = INSTANCES / "best_known.json"
    if not known.exists():
        print("the placement instances are not here; skipped")
        return
    for name, best in json.loads(known.read_text()).items():
        graph, k = read(INSTANCES / f"{name}.json", CostGraph), best["k"]
        problem = PartitionProblem(
            graph,
            k,
            communication=best["comm"],
            links=Links.of(Link(bandwidth_bytes_per_s=best["bandwidth_bytes_per_s"])),
            memory=MemoryConstraint.simple(
                graph, (best["memory_bytes"],) * k, (1,) * k, Fraction(1)
            ),
        )
        yield name, problem, best["best_max_load_ns"]


def captured_models() -> Iterator[tuple[str, PartitionProblem, int]]:
    """Yield the example models."""
    for name in MODELS:
        graph = captured_graph(name)
        yield from ((name, PartitionProblem(graph, k, links=LINK), 0) for k in STAGES)


def synthetic_graphs() -> Iterator[tuple[str, PartitionProblem, int]]:
    """Yield each family of synthetic graphs in each size."""
    for family in FAMILIES:
        for nodes in SIZES:
            graph = synthetic_graph(family, nodes)
            yield from (
                (f"{family} {nodes}", PartitionProblem(graph, k, links=LINK), 0) for k in STAGES
            )


# What the problems of a group are; `scale` makes its own, in processes of their own.
CASES: dict[str, Callable[[], Iterator[tuple[str, PartitionProblem, int]]]] = {
    "instances": instances,
    "captured": captured_models,
    "synthetic": synthetic_graphs,
}


def compare_all(group: str, cases: list[tuple[str, PartitionProblem, int]]) -> list[Row]:
    """Print a table for each objective; return its rows."""
    rows = []
    for objective, meaning in OBJECTIVES.items():
        print(f"\n{group}: {meaning} over its bound")
        print(
            f"{'':28} {'nodes':>6} {'k':>3} {'bound':>10} {'ours':>9} {_cells(BASELINES)}  method"
        )
        for name, problem, best in cases:
            known = best if objective == "max-load" else 0
            rows.append(compare(name, replace(problem, objective=objective), known))
            _show(rows[-1])
    return rows


def compare(name: str, problem: PartitionProblem, known: int) -> Row:
    """Return the row of one problem; `known` is a lower bound from elsewhere, or 0."""
    others = {label: _value(problem, baseline) for label, baseline in BASELINES.items()}
    started = time.perf_counter()
    row = {
        "name": name,
        "nodes": len(problem.graph.nodes),
        "k": problem.k,
        "objective": problem.objective,
    }
    try:
        partition = solve(problem, seconds=SECONDS)
    except InfeasibleError as error:
        feasible = [label for label, value in others.items() if isinstance(value, int)]
        return row | {
            "error": str(error),
            "violations": [f"{name}, k={problem.k}: {label}" for label in feasible],
        }
    seconds = time.perf_counter() - started
    return row | _ratios(name, problem, partition, known, others) | {"seconds": round(seconds, 2)}


def _ratios(
    name: str,
    problem: PartitionProblem,
    partition: Partition,
    known: int,
    others: dict[str, int | str],
) -> Row:
    value, bound = partition.search.value, max(partition.search.bound, known)
    assert value == _score(problem, partition.assignment), "ours is scored like the others"
    assert value >= bound, f"{name}: {value} is below {bound}, which was said to be a bound"
    ratios = {}
    for label, other in {"ours": value, **others}.items():
        ratios[label] = other if isinstance(other, str) else round(other / bound, 4)
    return {
        "bound": bound,
        "ratios": ratios,
        "method": partition.search.method,
        "proven": value == bound,
        "violations": [
            f"{name}, k={problem.k}, {problem.objective}: ours {value}, {label} {other}"
            for label, other in others.items()
            if isinstance(other, int) and other < value
        ],
    }


def _value(
    problem: PartitionProblem, baseline: Callable[[PartitionProblem], Assignment | None]
) -> int | str:
    """Return the objective of a baseline's cut, or why it has none: `-` or `memory`."""
    try:
        assignment = baseline(problem)
    except InfeasibleError:
        return "-"
    if assignment is None:
        return "-"
    fault = next(violations(problem, assignment), None)
    assert fault is None or "over its cap" in fault, fault
    return _score(problem, assignment) if fault is None else "memory"


def _score(problem: PartitionProblem, assignment: Assignment) -> int:
    return objective_value(problem.objective, rank_loads(problem, stage_loads(problem, assignment)))


def _show(row: Row) -> None:
    start = f"{row['name']:28} {row['nodes']:6} {row['k']:3}"
    if "error" in row:
        print(f"{start} {row['error']}")
        return
    proof = "proven" if row["proven"] else "not proven"
    cells = _cells(row["ratios"].values())
    print(
        f"{start} {row['bound']:10.4g} {cells}  {row['method']}, {proof}, {row['seconds']:.1f} s",
        flush=True,
    )


def _cells(values: Any) -> str:
    return " ".join(
        f"{value:>10}" if isinstance(value, str) else f"{value:10.3f}" for value in values
    )


def scale() -> list[Row]:
    """Print and return seconds and memory as graphs grow, each in a process of its own."""
    print(f"\nscale: {OBJECTIVES['max-load']} over its bound")
    print(f"{'':12} {'nodes':>6} {'k':>3} {'seconds':>8} {'peak MB':>8} {'ratio':>7}  method")
    rows = []
    for kind, nodes in SCALE:
        _run_alone(
            _graph, kind, nodes
        )  # A model is captured here, so that measure() only reads it.
        for k in SCALE_STAGES:
            rows.append(row := _run_alone(measure, kind, nodes, k))
            proof = "proven" if row["proven"] else "not proven"
            figures = f"{row['seconds']:8.1f} {row['peak_mb']:8} {row['ratio']:7.3f}"
            print(
                f"{kind:12} {row['nodes']:6} {k:3} {figures}  {row['method']}, {proof}", flush=True
            )
    return rows


def measure(kind: str, nodes: int, k: int) -> Row:
    """Return the seconds and the ratio of one cut, and the peak memory of this process."""
    graph = _graph(kind, nodes)
    started = time.perf_counter()
    search = solve(
        PartitionProblem(graph, k, objective="max-load", links=LINK), seconds=SECONDS
    ).search
    return {
        "kind": kind,
        "nodes": len(graph.nodes),
        "k": k,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_mb": _peak_bytes() // 10**6,
        "ratio": round(search.value / search.bound, 4),
        "method": search.method,
        "proven": search.proven,
    }


def _graph(kind: str, nodes: int) -> CostGraph:
    return synthetic_graph(kind, nodes) if kind in FAMILIES else deep_graph(kind, nodes)


def _peak_bytes() -> int:
    """Return the peak resident memory of this program alone."""
    # getrusage would also count what the parent held when it forked.
    high_water = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert high_water is not None
    return int(high_water[1]) * 1024


def _run_alone(function: Callable[..., T], *arguments: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    main(chosen_names(__doc__, "group", [*CASES, "scale"]))
