from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from cuts import chain, node

from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.links import Link, Links
from pipecompile.partition.objective import lower_bound, measures, rank_loads, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve

LINK = Links.of(Link(bandwidth_bytes_per_s=10**9))
SKIP = CostGraph(
    nodes=chain([10, 10, 10]).nodes,
    tensors=(Tensor(producer="n0", consumers=("n1", "n2"), bytes=5, gradient_bytes=2),),
)
APART = {"n0": 0, "n1": 1, "n2": 2}


@pytest.mark.parametrize(
    ("communication", "loads"),
    [
        ("relay", (17, 24, 17)),
        ("endpoint", (17, 17, 17)),
        ("overlap", (10, 14, 10)),
        ("none", (10, 10, 10)),
    ],
)
def test_what_a_skip_costs(communication: str, loads: tuple[int, ...]) -> None:
    assert (
        stage_loads(PartitionProblem(SKIP, 3, communication=communication, links=LINK), APART)
        == loads
    )


def test_each_boundary_has_the_links_of_its_ranks_there_and_back() -> None:
    """Rank 1 sends slowly: the gradient over the first boundary, the value over the second."""
    fast, slow = 10**9, 10**8
    links = Links(
        bandwidth_bytes_per_s=((None, fast, fast), (slow, None, slow), (fast, fast, None)),
        latency_ns=((0, 0, 0), (1, 0, 1), (0, 0, 0)),
    )
    first, second = 5 + (20 + 1), (50 + 1) + 2
    assert stage_loads(PartitionProblem(SKIP, 3, links=links), APART) == (
        10 + first,
        10 + first + second,
        10 + second,
    )


def test_nothing_is_charged_within_a_rank_and_ranks_add_up() -> None:
    problem = PartitionProblem(SKIP, 3, links=LINK, placement=(0, 0, 1))
    loads = stage_loads(problem, APART)
    assert (loads, rank_loads(problem, loads)) == ((10, 17, 17), (27, 17))
    endpoint = PartitionProblem(SKIP, 3, links=LINK, placement=(0, 0, 1), communication="endpoint")
    assert rank_loads(endpoint, stage_loads(endpoint, APART)) == (27, 17)


def test_slow_ranks_take_longer_rounded_up() -> None:
    problem = PartitionProblem(
        chain([10, 10, 10]), 3, speeds=(Fraction(3), Fraction(1), Fraction(1, 2))
    )
    assert stage_loads(problem, APART) == (4, 10, 20)


def test_replicas_share_a_load_and_reduce_gradients_once_a_step() -> None:
    graph = chain([12, 12], size=4, held=[30, 0])
    problem = PartitionProblem(graph, 2, links=LINK, replica_ranks=4, microbatches=5)
    # (12 + 4) / 3, rounded up, and a ring all-reduce of 30 bytes: 2 · 2/3 · 30 = 40, in 5 parts.
    assert stage_loads(problem, {"n0": 0, "n1": 1}, (3, 1)) == (6 + 8, 16)
    # A step of one microbatch: each of the 3 replicas has one before they reduce.
    assert stage_loads(replace(problem, microbatches=1), {"n0": 0, "n1": 1}, (3, 1)) == (6 + 14, 16)
    # What overlaps with computing counts only if it takes longer.
    overlapping = replace(problem, communication="overlap")
    assert stage_loads(overlapping, {"n0": 0, "n1": 1}, (3, 1)) == (8, 12)
    alike = Links(bandwidth_bytes_per_s=((10**9,) * 4,) * 4, latency_ns=0)
    assert stage_loads(replace(problem, links=alike), {"n0": 0, "n1": 1}, (3, 1)) == (6 + 8, 16)


def test_the_last_stage_does_not_recompute() -> None:
    graph = CostGraph(
        nodes=tuple(node(f"n{i}", 1, 1) for i in range(5)), tensors=chain([0] * 5).tensors
    )
    assert solve(PartitionProblem(graph, 2, recompute=True)).loads_with_transfers_ns == (6, 6)


def test_the_measures_of_loads() -> None:
    assert measures([1, 2, 6]) == {"max_load_ns": 6, "sum_of_squares_ns2": 41, "variance_ns2": 4}


def test_large_units_stand_alone_in_the_bound() -> None:
    graph = chain([9, 8, 1, 1, 1])
    assert lower_bound(PartitionProblem(graph, 3)) == 81 + 64 + 9
    assert lower_bound(PartitionProblem(graph, 3, objective="max-load")) == 9
