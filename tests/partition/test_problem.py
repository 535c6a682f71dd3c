from __future__ import annotations

from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.links import Links
from pipecompile.partition.problem import Memory, Problem
from pipecompile.partition.units import units


def _links(latencies: list[list[int]]) -> Links:
    return Links(bandwidth_bytes_per_s=None, latency_ns=tuple(map(tuple, latencies)))


def _graph(names: str, edges: str, groups: dict[str, str] | None = None) -> CostGraph:
    """Nodes by letter in order; edges as "ab ac" from the first letter to the second."""
    consumers = {
        name: tuple(edge[1] for edge in edges.split() if edge[0] == name) for name in names
    }
    return CostGraph(
        nodes=tuple(
            Node(
                name=name,
                forward_ns=1,
                backward_ns=2,
                parameter_bytes=0,
                saved_bytes=0,
                group=(groups or {}).get(name),
            )
            for name in names
        ),
        tensors=tuple(
            Tensor(producer=name, consumers=to, bytes=1, gradient_bytes=1)
            for name, to in consumers.items()
            if to
        ),
    )


def _units(*arguments: object) -> list[str]:
    return ["".join(unit) for unit in units(_graph(*arguments))]  # type: ignore[arg-type]


def test_units_follow_the_order_of_the_graph() -> None:
    assert _units("abcd", "ac ad bd") == ["a", "b", "c", "d"]
    assert _units("abcd", "da db") == ["c", "d", "a", "b"]


def test_a_group_is_one_unit_and_its_members_keep_their_order() -> None:
    assert _units("abcd", "ab cd", {"a": "g", "d": "g", "b": "h"}) == ["c", "ad", "b"]


def test_what_lies_between_two_members_of_a_group_joins_it() -> None:
    assert _units("abcde", "ab bc cd de", {"a": "g", "c": "g"}) == ["abc", "d", "e"]


def test_groups_that_feed_each_other_are_one_unit() -> None:
    assert _units("abcd", "ab cd", {"a": "g", "d": "g", "b": "h", "c": "h"}) == ["abcd"]


def test_inputs_come_first_and_outputs_last() -> None:
    assert _units("ioab", "ia ao", {"i": "inputs", "o": "outputs"}) == ["i", "a", "b", "o"]


@given(
    st.integers(1, 9),
    st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=14),
    st.data(),
)
def test_units_are_a_topological_order_of_the_merged_graph(
    size: int, pairs: set[tuple[int, int]], data: st.DataObject
) -> None:
    names = "abcdefghi"[:size]
    edges = " ".join(
        f"{names[a]}{names[b]}" for a, b in sorted(pairs) if a < size and b < size and a != b
    )
    groups = {
        name: group
        for name in names
        if (group := data.draw(st.sampled_from(["", "", "", "g", "h"])))
    }
    graph = _graph(names, edges, groups)
    found = units(graph)
    position = {name: index for index, unit in enumerate(found) for name in unit}
    assert sorted(position) == list(names)
    assert all(
        position[t.producer] <= position[name] for t in graph.tensors for name in t.consumers
    )
    assert all(list(unit) == sorted(unit) for unit in found)
    together = nx.DiGraph([(t.producer, name) for t in graph.tensors for name in t.consumers])
    together.add_nodes_from(names)
    together.add_edges_from((a, b) for a in groups for b in groups if groups[a] == groups[b])
    assert {frozenset(unit) for unit in found} == {
        frozenset(c) for c in nx.strongly_connected_components(together)
    }
    assert units(graph) == found


def test_more_stages_than_units_are_refused_with_the_largest_groups() -> None:
    graph = _graph("abcde", "ab bc cd de", {"a": "embedding", "b": "embedding", "c": "embedding"})
    with pytest.raises(InfeasibleError) as caught:
        _ = Problem(graph, 4).units
    assert str(caught.value) == (
        "k=4, but the graph can be cut into at most 3 stages "
        "(nodes that stay together: embedding with 3 nodes); choose k ≤ 3"
    )


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"k": 0}, "k=0, but a pipeline has at least one stage"),
        (
            {"k": 2, "objective": "beauty"},
            "objective 'beauty' is not known; choose one of variance, max-load",
        ),
        (
            {"k": 2, "communication": "pigeon"},
            "communication 'pigeon' is not known; choose one of relay, endpoint",
        ),
        ({"k": 2, "objective": "step-time"}, "objective step-time needs a schedule to simulate"),
        ({"k": 2, "placement": (0,)}, "the placement names 1 stages, but k=2"),
        ({"k": 2, "placement": (0, 2)}, r"the placement \(0, 2\) must use every rank from 0 on"),
        ({"k": 2, "speeds": (Fraction(1),)}, "speeds 1 must be 2 positive numbers, one a rank"),
        ({"k": 2, "speeds": (Fraction(1), Fraction(0))}, "speeds 1, 0 must be 2 positive numbers"),
        ({"k": 2, "links": _links([[0]])}, "the links are for 1 ranks, but there are 2"),
        (
            {"k": 2, "links": _links([[0, 1], [2, 0]]), "communication": "endpoint"},
            "endpoint communication knows no",
        ),
        (
            {"k": 2, "links": _links([[0, 1, 1], [2, 0, 1], [1, 1, 0]]), "replica_ranks": 3},
            "replicated stages need .* one link",
        ),
        ({"k": 2, "replica_ranks": 1}, "1 ranks are fewer than the k=2 stages"),
        (
            {"k": 2, "replica_ranks": 3, "speeds": (Fraction(1),) * 2},
            "replicated stages need one stage a rank",
        ),
        ({"k": 2, "microbatches": 0}, "microbatches=0, but a step has at least one"),
        ({"k": 2, "together": (("a", "z"),)}, "the graph has no node 'z' to keep together"),
        (
            {"k": 2, "memory": Memory((1,), (1, 1), {}, {})},
            "memory must be given for 2 ranks and 2 stages",
        ),
        ({"k": 2, "pin": {"z": 0}}, "pin z=0: the graph has no such node"),
        ({"k": 2, "pin": {"a": 2}}, r"pin a=2: the stages are 0 … 1, or -1 … -2 from the end"),
    ],
)
def test_what_does_not_fit_is_refused(problem: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Problem(_graph("ab", "ab"), **problem)  # type: ignore[arg-type]


def test_pins_count_from_the_end_too() -> None:
    assert Problem(_graph("abc", "ab bc"), 3, pin={"a": 0, "c": -1}).pins == {("a",): 0, ("c",): 2}


def test_nodes_that_stay_together_cannot_be_pinned_apart() -> None:
    problem = Problem(_graph("abc", "ab bc", {"a": "g", "b": "g"}), 2, pin={"a": 0, "b": 1})
    with pytest.raises(InfeasibleError, match="pins a=0 and b=1: these nodes cannot be separated"):
        _ = problem.pins
