"""The partitioners of other tools, for `benchmarks.partition`.

Each takes a problem, cuts the order of `PartitionProblem.units` into k intervals and returns the
stage of every node. It returns None where it finds no k stages that are not empty, and raises
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
TORCHGPIPE_SECONDS = 5  # It takes 0.01 s for a thousand units, or it never ends.
BLOCK_SIZES = """
import json, runpy, sys
blocks = runpy.run_path(sys.argv[1])["solve"](*json.load(sys.stdin))
print(json.dumps([len(block) for block in blocks]))
"""


def uniform(problem: PartitionProblem) -> Assignment | None:
    """Return the cut with the same number of units in every stage."""
    count = len(problem.units)
    return _assignment_of(problem, [count * stage // problem.k for stage in range(1, problem.k)])


def parameter_balanced(problem: PartitionProblem) -> Assignment | None:
    """Return the cut of DeepSpeed's default, `partition_method="parameters"`."""
    nodes = problem.graph.by_name
    weights = [sum(nodes[name].parameter_bytes for name in unit) for unit in problem.units]
    return _assignment_of(problem, partition_balanced(weights, problem.k))


def deepspeed(problem: PartitionProblem) -> Assignment | None:
    """Return the cut that DeepSpeed's balancing finds for the units' compute times."""
    return _assignment_of(problem, partition_balanced(_compute(problem), problem.k))


def torchgpipe(problem: PartitionProblem) -> Assignment | None:
    """Return the cut of torchgpipe's block partition for the units' compute times.

    None where the package does not end, as with units that take no time.
    """
    try:
        sizes = _block_sizes(_compute(problem), problem.k)
    except subprocess.TimeoutExpired:
        return None
    return _assignment_of(problem, list(accumulate(sizes[:-1])))


def _block_sizes(weights: Sequence[int], parts: int) -> list[int]:
    """Return the number of units in each block, as the installed torchgpipe finds them.

    It runs in a process that can be ended, and is loaded by file because importing the package
    imports torch.
    """
    package = find_spec("torchgpipe")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "balance" / "blockpartition.py"
    arguments = json.dumps([list(weights), parts]).encode()
    answer = subprocess.run(
        [sys.executable, "-c", BLOCK_SIZES, path],
        input=arguments,
        stdout=subprocess.PIPE,
        timeout=TORCHGPIPE_SECONDS,
        check=True,
    )
    sizes: list[int] = json.loads(answer.stdout)
    return sizes


def has_torchgpipe() -> bool:
    """Return whether the package torchgpipe is installed."""
    return find_spec("torchgpipe") is not None


def communication_blind(problem: PartitionProblem) -> Assignment | None:
    """Return the cut with the least maximal compute, which is exact but ignores communication.

    A bisection finds the least limit under which greedy filling leaves no unit over.
    """
    compute = _compute(problem)
    sums = list(accumulate(compute, initial=0))
    low, high = max(compute), sums[-1]
    while low < high:
        middle = (low + high) // 2
        fits = sums[-1] - sums[_filled_starts(sums, problem.k, middle)[-1]] <= middle
        low, high = (low, middle) if fits else (middle + 1, high)
    return _assignment_of(problem, _filled_starts(sums, problem.k, low)[1:])


def _filled_starts(sums: Sequence[int], k: int, limit: int) -> list[int]:
    """Return where the stages start if each takes as many units as `limit` allows.

    `sums` are the prefix sums of the units' times. Example with times 2, 2, 2, 2, k = 3, limit 6:
    stage 0 could take three units, but two must remain for the others; the starts are 0, 2, 3.
    """
    starts = [0]
    for stage in range(1, k):
        most = bisect_right(sums, sums[starts[-1]] + limit) - 1
        starts.append(min(most, len(sums) - 1 - (k - stage)))
    return starts


def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return the inner ends of `parts` intervals.

    They are those of `partition_balanced` in deepspeed/runtime/utils.py (0.19). For each prefix and
    number of parts it keeps one cut, the one whose largest and smallest parts differ least, and
    extends that. DeepSpeed takes O(weights² · parts) steps of Python; here a step is a numpy row.
    """
    count, columns = len(weights), np.arange(parts)
    sums = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    largest, smallest = np.full((2, count + 1, parts + 1), np.inf)
    largest[0, 0] = 0
    starts = np.zeros((count + 1, parts + 1), np.intp)
    for stop in range(1, count + 1):
        part = (sums[stop] - sums[:stop])[:, None]
        most, least = np.maximum(largest[:stop, :-1], part), np.minimum(smallest[:stop, :-1], part)
        # argmin of the reversed rows: DeepSpeed keeps the last of equally good starts.
        start = stop - 1 - (most - least)[::-1].argmin(axis=0)
        largest[stop, 1:], smallest[stop, 1:], starts[stop, 1:] = (
            most[start, columns],
            least[start, columns],
            start,
        )
    # Walk back from the full prefix: the start of the last part is the end of the part before it.
    ends = [count]
    for part_count in range(parts, 1, -1):
        ends.append(int(starts[ends[-1], part_count]))
    return ends[:0:-1]


def _compute(problem: PartitionProblem) -> list[int]:
    return [problem.compute_ns(unit, last=False) for unit in problem.units]


def _assignment_of(problem: PartitionProblem, cuts: Sequence[int]) -> Assignment | None:
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
