"""Partitioners of others, for comparison: each cuts the order of `Problem.units` into intervals.

Each takes a problem and gives the stage of every node; None where it finds no k stages that are not empty.
InfeasibleError where there are fewer units than stages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from pipecompile.partition.problem import PartitionProblem

__all__ = [
    "BASELINES",
    "communication_blind",
    "deepspeed",
    "has_torchgpipe",
    "parameter_balanced",
    "partition_balanced",
    "torchgpipe",
    "uniform",
]

Assignment = dict[str, int]
ENDLESS_S = 5  # it takes 0.01 s for a thousand units
BLOCK_SIZES = """
import json, runpy, sys
blocks = runpy.run_path(sys.argv[1])["solve"](*json.load(sys.stdin))
print(json.dumps([len(block) for block in blocks]))
"""


def uniform(problem: PartitionProblem) -> Assignment | None:
    """The same number of units in every stage."""
    count = len(problem.units)
    return _assigned(problem, [count * stage // problem.k for stage in range(1, problem.k)])


def parameter_balanced(problem: PartitionProblem) -> Assignment | None:
    """DeepSpeed's default, `partition_method="parameters"`: its balance, of parameters."""
    nodes = problem.graph.by_name
    weights = [sum(nodes[name].parameter_bytes for name in unit) for unit in problem.units]
    return _assigned(problem, partition_balanced(weights, problem.k))


def deepspeed(problem: PartitionProblem) -> Assignment | None:
    """DeepSpeed's balance, of compute."""
    return _assigned(problem, partition_balanced(_compute(problem), problem.k))


def torchgpipe(problem: PartitionProblem) -> Assignment | None:
    """The block partition of torchgpipe's package, of compute; None where it runs on and on, as among free units."""
    try:
        sizes = _block_sizes(_compute(problem), problem.k)
    except subprocess.TimeoutExpired:
        return None
    return _assigned(problem, list(accumulate(sizes[:-1])))


def _block_sizes(weights: Sequence[int], parts: int) -> list[int]:
    """In a process that can be ended; by file, because importing the package imports torch."""
    package = find_spec("torchgpipe")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "balance" / "blockpartition.py"
    given = json.dumps([list(weights), parts]).encode()
    answer = subprocess.run(
        [sys.executable, "-c", BLOCK_SIZES, path],
        input=given,
        stdout=subprocess.PIPE,
        timeout=ENDLESS_S,
        check=True,
    )
    sizes: list[int] = json.loads(answer.stdout)
    return sizes


def has_torchgpipe() -> bool:
    """Whether its package is installed."""
    return find_spec("torchgpipe") is not None


def communication_blind(problem: PartitionProblem) -> Assignment | None:
    """The intervals of least maximal compute, exactly: the least limit that filling one stage after another meets."""
    compute = _compute(problem)
    sums = list(accumulate(compute, initial=0))
    low, high = max(compute), sums[-1]
    while low < high:
        middle = (low + high) // 2
        fits = sums[-1] - sums[_filled(sums, problem.k, middle)[-1]] <= middle
        low, high = (low, middle) if fits else (middle + 1, high)
    return _assigned(problem, _filled(sums, problem.k, low)[1:])


def _filled(sums: Sequence[int], k: int, limit: int) -> list[int]:
    """The starts of stages that each take all they may, but leave a unit to each of the stages after them."""
    starts = [0]
    for stage in range(1, k):
        most = bisect_right(sums, sums[starts[-1]] + limit) - 1
        starts.append(min(most, len(sums) - 1 - (k - stage)))
    return starts


def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """The inner ends of `parts` intervals, as `partition_balanced` of deepspeed/runtime/utils.py (0.19) finds them.

    Per prefix and number of parts it keeps one cut, of the least difference between its largest and its smallest
    part, and extends that. The package itself takes O(weights² · parts) steps of Python; these are its whole rows.
    """
    count, columns = len(weights), np.arange(parts)
    sums = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    largest, smallest = np.full((2, count + 1, parts + 1), np.inf)
    largest[0, 0] = 0
    starts = np.zeros((count + 1, parts + 1), np.intp)
    for stop in range(1, count + 1):
        part = (sums[stop] - sums[:stop])[:, None]
        most, least = np.maximum(largest[:stop, :-1], part), np.minimum(smallest[:stop, :-1], part)
        start = stop - 1 - (most - least)[::-1].argmin(axis=0)  # of equals the last
        largest[stop, 1:], smallest[stop, 1:], starts[stop, 1:] = (
            most[start, columns],
            least[start, columns],
            start,
        )
    ends = [count]
    for part_count in range(parts, 1, -1):
        ends.append(int(starts[ends[-1], part_count]))
    return ends[:0:-1]


def _compute(problem: PartitionProblem) -> list[int]:
    return [problem.compute_ns(unit, last=False) for unit in problem.units]


def _assigned(problem: PartitionProblem, cuts: Sequence[int]) -> Assignment | None:
    ends = [0, *cuts, len(problem.units)]
    if any(start >= stop for start, stop in pairwise(ends)):
        return None
    return {
        name: stage
        for stage, (start, stop) in enumerate(pairwise(ends))
        for unit in problem.units[start:stop]
        for name in unit
    }


BASELINES: dict[str, Callable[[PartitionProblem], Assignment | None]] = {
    "uniform": uniform,
    "parameters": parameter_balanced,
    "deepspeed": deepspeed,
    "torchgpipe": torchgpipe,
    "blind": communication_blind,
}
