from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines import (
    BASELINES,
    Assignment,
    communication_blind,
    deepspeed,
    has_torchgpipe,
    parameter_balanced,
    partition_balanced,
    torchgpipe,
    uniform,
)
from benchmarks.cost_graphs import FAMILIES, synthetic_graph
from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.violations import violations


def _chain(*times: int, parameters: tuple[int, ...] = ()) -> CostGraph:
    names = [f"n{index}" for index in range(len(times))]
    weights = parameters or (0,) * len(times)
    return CostGraph(
        nodes=tuple(
            Node(
                name=name,
                forward_ns=time,
                backward_ns=0,
                parameter_bytes=weight,
                saved_bytes=0,
                group=None,
            )
            for name, time, weight in zip(names, times, weights, strict=True)
        ),
        tensors=tuple(
            Tensor(producer=a, consumers=(b,), bytes=8, gradient_bytes=8)
            for a, b in pairwise(names)
        ),
    )


def _sizes(assignment: Assignment | None) -> list[int]:
    """How many nodes each stage has."""
    assert assignment is not None
    stages = list(assignment.values())
    return [stages.count(stage) for stage in range(max(stages) + 1)]


def _needs_torchgpipe() -> None:
    if not has_torchgpipe():
        pytest.skip("the package torchgpipe is not installed")


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 2, 7])
def test_every_baseline_gives_a_cut_into_k_stages(name: str, family: str, k: int) -> None:
    if name == "torchgpipe":
        _needs_torchgpipe()
    problem = PartitionProblem(synthetic_graph(family, 40), k)
    assignment = BASELINES[name](problem)
    assert assignment is not None
    assert assignment.keys() == problem.graph.by_name.keys()
    assert list(violations(problem, assignment)) == []


def test_uniform_counts_units() -> None:
    assert _sizes(uniform(PartitionProblem(_chain(9, 1, 1, 1, 1, 1), 3))) == [2, 2, 2]


def test_parameters_and_compute_are_balanced_by_the_same_algorithm() -> None:
    graph = _chain(1, 1, 1, 9, parameters=(9, 3, 3, 3))
    assert _sizes(deepspeed(PartitionProblem(graph, 2))) == [3, 1]
    assert _sizes(parameter_balanced(PartitionProblem(graph, 2))) == [1, 3]


# What deepspeed 0.19.8 answers.
@pytest.mark.parametrize(
    ("weights", "parts", "ends"),
    [
        ([1, 2, 3, 4, 5, 6], 3, [3, 5]),
        ([5, 0, 0, 0, 7, 1, 0, 2], 4, [4, 5, 7]),
        ([9, 1, 1, 1, 1, 1, 1, 3, 3], 3, [1, 7]),
        ([4, 4, 4], 3, [1, 2]),
    ],
)
def test_balance_is_that_of_deepspeed(weights: list[int], parts: int, ends: list[int]) -> None:
    assert partition_balanced(weights, parts) == ends


def test_torchgpipe_is_asked() -> None:
    _needs_torchgpipe()
    assert _sizes(torchgpipe(PartitionProblem(_chain(1, 2, 3, 4, 5, 6), 2))) == [4, 2]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_communication_blind_cut_is_the_best_of_all(times: list[int], k: int) -> None:
    problem = PartitionProblem(_chain(*times), min(k, len(times)))
    sizes = _sizes(communication_blind(problem))
    assert len(sizes) == problem.k
    cuts = combinations(range(1, len(times)), problem.k - 1)
    assert _largest(times, _starts(sizes)) == min(_largest(times, list(cut)) for cut in cuts)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:stage]) for stage in range(1, len(sizes))]


def _largest(times: list[int], cut: list[int]) -> int:
    return max(sum(times[start:stop]) for start, stop in pairwise([0, *cut, len(times)]))


@pytest.mark.parametrize("baseline", [uniform, parameter_balanced, deepspeed, communication_blind])
def test_more_stages_than_units_are_refused(baseline: Callable[[PartitionProblem], object]) -> None:
    with pytest.raises(InfeasibleError, match="k=3"):
        baseline(PartitionProblem(_chain(1, 1), 3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [20, 100, 1000])
def test_synthetic_graphs_are_acyclic_and_about_as_large_as_asked_for(
    family: str, nodes: int
) -> None:
    graph = synthetic_graph(family, nodes)
    assert 0.85 * nodes <= len(graph.nodes) <= nodes + 25
    edges = nx.DiGraph(
        (tensor.producer, name) for tensor in graph.tensors for name in tensor.consumers
    )
    assert nx.is_directed_acyclic_graph(edges)
    assert len(PartitionProblem(graph, 2).units) == len(graph.nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_synthetic_graphs_depend_on_their_arguments_alone(family: str) -> None:
    assert synthetic_graph(family, 60, 1) == synthetic_graph(family, 60, 1)
    assert synthetic_graph(family, 60, 1) != synthetic_graph(family, 60, 2)
