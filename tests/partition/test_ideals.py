"""The worked examples of `boundaries` and `ideals`: a diamond a → b, c → d."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from cuts import letter_graph

from pipecompile.ir.links import Link, Links
from pipecompile.partition.boundaries import Boundaries
from pipecompile.partition.ideals import Ideals, enumerate_ideals
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import UnitGraph

IDEALS = ["", "a", "ab", "ac", "abc", "abcd"]
TIMES = {"a": 2, "b": 3, "c": 1, "d": 4}
SIZES = {"a": 5, "b": 2, "c": 3}  # bytes, and ns at 1 byte a ns


def diamond() -> UnitGraph:
    graph = letter_graph("abcd", "ab ac bd cd")
    graph = msgspec.structs.replace(
        graph,
        nodes=tuple(
            msgspec.structs.replace(node, forward_ns=TIMES[node.name], backward_ns=0)
            for node in graph.nodes
        ),
        tensors=tuple(
            msgspec.structs.replace(tensor, bytes=SIZES[tensor.producer], gradient_bytes=0)
            for tensor in graph.tensors
        ),
    )
    links = Links.of(Link(bandwidth_bytes_per_s=10**9))
    return UnitGraph.of(PartitionProblem(graph, 3, communication="endpoint", links=links))


def all_ideals(unit_graph: UnitGraph) -> Ideals:
    nothing, everything = np.zeros(0, np.intp), np.arange(unit_graph.count)
    ideals = enumerate_ideals(unit_graph, nothing, everything, limit=10)
    assert ideals is not None
    return Ideals(unit_graph, [ideals])


def row_of(family: Boundaries, names: str) -> np.ndarray:
    """The row of the ideal with these units."""
    wanted = np.array([name in names for name in "abcd"])
    return np.array([row for row in range(len(family)) if (family.members(row) == wanted).all()])


def test_every_ideal_arises_once_with_its_sums() -> None:
    family = all_ideals(diamond())
    rows = [int(row_of(family, names)[0]) for names in IDEALS]
    assert sorted(rows) == list(range(len(IDEALS)))
    assert family.sums.compute[0][rows].tolist() == [0, 2, 5, 3, 6, 10]
    (hop,) = family.unit_graph.hops
    assert family.sums.crossing[hop][rows].tolist() == [0, 5, 7, 8, 5, 0]


def test_more_ideals_than_the_limit_are_not_enumerated() -> None:
    unit_graph = diamond()
    nothing, everything = np.zeros(0, np.intp), np.arange(unit_graph.count)
    assert enumerate_ideals(unit_graph, nothing, everything, limit=5) is None


@pytest.mark.parametrize("kind", ["ideals", "prefixes"])
@pytest.mark.parametrize(
    ("a", "b", "surplus"),
    [
        ("a", "ab", 5),  # a's tensor crosses both, and its consumer b lies in the stage
        ("a", "abc", 0),  # it ends in the stage
        ("ab", "abc", 4),  # b's tensor passes by the stage c: relay charges it twice
        ("", "ab", 0),
    ],
)
def test_what_relay_charges_more_than_endpoint(kind: str, a: str, b: str, surplus: int) -> None:
    unit_graph = diamond()
    family = all_ideals(unit_graph) if kind == "ideals" else Prefixes(unit_graph, range(4))
    (hop,) = unit_graph.hops
    assert family.relay_surplus(row_of(family, a), row_of(family, b), hop).tolist() == [[surplus]]


@pytest.mark.parametrize("kind", ["ideals", "prefixes"])
def test_strict_subsets(kind: str) -> None:
    unit_graph = diamond()
    family = all_ideals(unit_graph) if kind == "ideals" else Prefixes(unit_graph, range(4))
    rows = np.arange(len(family))
    members = [family.members(row) for row in rows]
    expected = [[bool((a <= b).all() and (a != b).any()) for b in members] for a in members]
    assert family.is_subset(rows, rows).tolist() == expected
