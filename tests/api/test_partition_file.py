"""The partitioner on files, and the simulated step as its objective."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from cuts import chain, cuts, graphs
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.api.partition_file import (
    CutRequest,
    links_from_options,
    partition,
    partition_over_ranks,
)
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Link, Links
from pipecompile.ir.serialization import encode, write
from pipecompile.partition.objective import lower_bound, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve


def _file(tmp_path: Path, graph: CostGraph) -> Path:
    path = tmp_path / "graph.json"
    write(path, encode(graph))
    return path


@given(
    graphs(6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["1f1b", "gpipe"]),
    st.booleans(),
)
def test_no_other_objective_has_a_shorter_step_and_the_bound_holds(
    graph: CostGraph, k: int, microbatches: int, schedule: str, free: bool
) -> None:
    request = CutRequest(
        k=k,
        objective="step-time",
        schedule=schedule,
        microbatches=microbatches,
        communication="relay",
        links=Links.of(Link(bandwidth_bytes_per_s=None if free else 10**9)),
    )
    if k > len(graph.nodes):
        return
    problem = request.problem(graph)
    every = list(cuts(problem))
    if not every:
        return
    assert problem.step_ns is not None
    best = min(map(problem.step_ns, every))
    result = solve(problem, seconds=1.0)
    assert lower_bound(problem) <= result.search.bound <= best <= result.search.value
    assert result.search.value == problem.step_ns(result.assignment)
    for objective in ("variance", "max-load"):
        other = solve(replace(problem, objective=objective), seconds=1.0)
        assert result.search.value <= problem.step_ns(other.assignment)


def test_memory_counts_the_microbatches_in_flight(tmp_path: Path) -> None:
    graph = chain([1] * 4)
    nodes = tuple(msgspec.structs.replace(node, saved_bytes=10) for node in graph.nodes)
    path = _file(tmp_path, CostGraph(nodes=nodes, tensors=graph.tensors))
    assert partition(path, CutRequest(k=2, memory="20")).loads_with_transfers_ns == (2, 2)
    held = CutRequest(k=2, memory="30", schedule="1f1b", microbatches=2)
    assert partition(path, held).loads_with_transfers_ns == (1, 3)
    with pytest.raises(
        InfeasibleError, match="30 B, but the best cut into k=2 stages that was found needs 40 B"
    ):
        partition(path, replace(held, schedule="gpipe"))


def test_what_would_fit_is_true(tmp_path: Path) -> None:
    path = _file(tmp_path, chain([1] * 6, held=[10] * 6))
    with pytest.raises(InfeasibleError, match="this would fit: k=3 or k=4") as caught:
        partition(path, CutRequest(k=2, memory="20"))
    assert "needs 30 B, 10 B more" in str(caught.value)
    assert partition(path, CutRequest(k=3, memory="20")).proven


def test_stages_go_around_the_ranks_or_there_and_back(tmp_path: Path) -> None:
    assert CutRequest(k=6, stages_per_rank=2).stage_ranks == (0, 1, 2, 0, 1, 2)
    assert CutRequest(k=6, stages_per_rank=2, placement="v").stage_ranks == (0, 1, 2, 2, 1, 0)
    assert CutRequest(k=6, stages_per_rank=2, placement="linear").stage_ranks == (0, 0, 1, 1, 2, 2)
    path = _file(tmp_path, chain([4, 1, 1, 4, 2, 2]))
    around = partition(
        path, CutRequest(k=4, objective="max-load", stages_per_rank=2, speeds="1,0.5")
    )
    assert (len(around.loads_with_transfers_ns), around.proven) == (2, True)


def test_replicas_divide_the_load(tmp_path: Path) -> None:
    path = _file(tmp_path, chain([2, 2, 8, 8]))
    result = partition(path, CutRequest(k=2, objective="max-load", ranks=5))
    assert (result.replicas, result.loads_with_transfers_ns) == ((1, 4), (4, 4))


@given(graphs(4), st.integers(1, 4), st.sampled_from([None, 10**9]))
def test_no_number_of_stages_is_better(graph: CostGraph, ranks: int, bandwidth: int | None) -> None:
    """Brute force over all cuts into all numbers of stages, on all numbers of replicas."""
    links = Links(bandwidth_bytes_per_s=bandwidth, latency_ns=0)
    request = CutRequest(k=1, objective="max-load", ranks=ranks, links=links)
    with TemporaryDirectory() as folder:
        result = partition_over_ranks(_file(Path(folder), graph), request)
    values = []
    for k in range(1, min(ranks, len(PartitionProblem(graph, 1).units)) + 1):
        problem = replace(request, k=k).problem(graph)
        every = [r for r in product(range(1, ranks + 1), repeat=k) if sum(r) <= ranks]
        values += [
            max(stage_loads(problem, cut, replicas)) for cut in cuts(problem) for replicas in every
        ]
    assert (result.value, result.proven) == (min(values), True)


def test_numbers_of_stages_are_compared_by_the_largest_load(tmp_path: Path) -> None:
    path = _file(tmp_path, chain([1, 1]))
    for request in (CutRequest(k=1, ranks=2), CutRequest(k=1, objective="max-load")):
        with pytest.raises(InputError, match="give --ranks and --objective max-load"):
            partition_over_ranks(path, request)


def test_a_cap_rules_out_numbers_of_stages(tmp_path: Path) -> None:
    path = _file(tmp_path, chain([1, 1, 1], held=[10, 10, 10]))
    request = CutRequest(k=1, objective="max-load", ranks=3, memory="10")
    assert partition_over_ranks(path, request).replicas == (1, 1, 1)
    with pytest.raises(InfeasibleError):
        partition_over_ranks(path, replace(request, memory="9"))


def test_links_from_rank_to_rank(tmp_path: Path) -> None:
    links = Links(bandwidth_bytes_per_s=((None, 10), (10, None)), latency_ns=((0, 7), (7, 0)))
    write(path := tmp_path / "links.json", encode(links))
    assert links_from_options(str(path), None, 0) == links
    with pytest.raises(InputError, match="leave --bandwidth"):
        links_from_options(str(path), 1e9, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 3, "stages_per_rank": 2}, "k=3 stages cannot lie 2 on each rank"),
        ({"k": 2, "schedule": "gpipe"}, "--schedule and --microbatches go together"),
        (
            {"k": 4, "stages_per_rank": 2, "schedule": "gpipe", "microbatches": 2},
            "knows one stage a rank",
        ),
        (
            {"k": 2, "speeds": "1,2,3"},
            "--speeds 1,2,3: give one value, or one for each of the 2 ranks",
        ),
        ({"k": 2, "speeds": "fast"}, "'fast' is not a number"),
        ({"k": 2, "memory": "1,2,3"}, "--memory 1,2,3: give one value"),
        ({"k": 2, "objective": "step-time"}, "needs a schedule to simulate"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        partition(_file(tmp_path, chain([1] * 6)), CutRequest(**options))  # type: ignore[arg-type]


def test_fractions_of_speed_are_exact() -> None:
    assert CutRequest(k=2, speeds="0.1,3/2").problem(chain([1, 1])).speeds == (
        Fraction(1, 10),
        Fraction(3, 2),
    )
