from __future__ import annotations

from fractions import Fraction

import pytest
from cuts import letter_graph

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.links import Links
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem


def _links(latencies: list[list[int]]) -> Links:
    return Links(bandwidth_bytes_per_s=None, latency_ns=tuple(map(tuple, latencies)))


def test_more_stages_than_units_are_refused_with_the_largest_groups() -> None:
    graph = letter_graph(
        "abcde", "ab bc cd de", {"a": "embedding", "b": "embedding", "c": "embedding"}
    )
    with pytest.raises(InfeasibleError) as caught:
        _ = PartitionProblem(graph, 4).units
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
            "unknown objective 'beauty'; choose from variance, max-load",
        ),
        (
            {"k": 2, "communication": "pigeon"},
            "unknown communication 'pigeon'; choose from relay, endpoint",
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
        ({"k": 2, "together": (("a", "z"),)}, "unknown node to keep together with others 'z'"),
        (
            {"k": 2, "memory": MemoryConstraint((1,), (1, 1), {}, {})},
            "memory must be given for 2 ranks and 2 stages",
        ),
        ({"k": 2, "pin": {"z": 0}}, "unknown node to pin 'z'"),
        ({"k": 2, "pin": {"a": 2}}, r"pin a=2: the stages are 0 … 1, or -1 … -2 from the end"),
    ],
)
def test_what_does_not_fit_is_refused(problem: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PartitionProblem(letter_graph("ab", "ab"), **problem)  # type: ignore[arg-type]


def test_pins_count_from_the_end_too() -> None:
    assert PartitionProblem(letter_graph("abc", "ab bc"), 3, pin={"a": 0, "c": -1}).pins == {
        ("a",): 0,
        ("c",): 2,
    }


def test_nodes_that_stay_together_cannot_be_pinned_apart() -> None:
    problem = PartitionProblem(
        letter_graph("abc", "ab bc", {"a": "g", "b": "g"}), 2, pin={"a": 0, "b": 1}
    )
    with pytest.raises(InfeasibleError, match="pins a=0 and b=1: these nodes cannot be separated"):
        _ = problem.pins
