from __future__ import annotations

import msgspec
import pytest
from cuts import node

from pipecompile.ir.graph import CostGraph, Parameter, Tensor
from pipecompile.partition.summation import gradient_sum_order


def test_the_order_in_which_gradients_are_summed_is_kept() -> None:
    """The unsplit model adds d + c, then b, then a: only c and d may change places."""
    fork = Tensor(producer="x", consumers=("a", "b", "c", "d"), bytes=1, gradient_bytes=1)
    graph = CostGraph(nodes=tuple(node(name, 1) for name in "xabcd"), tensors=(fork,))
    assert set(gradient_sum_order(graph)) == {("a", "b"), ("b", "c"), ("b", "d")}
    pair = msgspec.structs.replace(fork, consumers=("a", "b"))
    assert not list(gradient_sum_order(msgspec.structs.replace(graph, tensors=(pair,))))


@pytest.mark.parametrize("ordered", ["b", "c"])
def test_a_reader_whose_gradients_are_ordered_keeps_its_place(ordered: str) -> None:
    """It gives several, or one that lies otherwise, as a sum does that begins with it."""
    nodes = {name: node(name, 1) for name in "xabc"}
    nodes[ordered] = msgspec.structs.replace(nodes[ordered], has_ordered_gradients=True)
    for readers, pairs in {"bc": {("b", "c")}, "abc": {("a", "b"), ("b", "c")}}.items():
        fork = Tensor(producer="x", consumers=tuple(readers), bytes=1, gradient_bytes=1)
        graph = CostGraph(nodes=tuple(nodes.values()), tensors=(fork,))
        assert set(gradient_sum_order(graph)) == pairs


def test_readers_of_what_a_node_returns_are_readers_of_its_argument() -> None:
    """The model reads x in a, c and d; y is x, and lies behind a."""
    tensors = (
        Tensor(producer="x", consumers=("a", "y"), bytes=1, gradient_bytes=1),
        Tensor(producer="y", consumers=("c", "d"), bytes=1, gradient_bytes=1, sums_with="x"),
    )
    graph = CostGraph(nodes=tuple(node(name, 1) for name in "xaycd"), tensors=tensors)
    assert set(gradient_sum_order(graph)) == {("a", "c"), ("a", "d"), ("a", "y")}


@pytest.mark.parametrize("trainable", [True, False])
def test_so_is_that_of_the_readers_of_a_parameter(trainable: bool) -> None:
    shared = Parameter(name="p", bytes=1, trainable=trainable)
    nodes = tuple(msgspec.structs.replace(node(name, 1), parameters=("p",)) for name in "abcd")
    pairs = {("a", "b"), ("b", "c"), ("b", "d")} if trainable else set()
    assert (
        set(gradient_sum_order(CostGraph(nodes=nodes, tensors=(), parameters=(shared,)))) == pairs
    )


def test_a_gradient_that_repeats_elements_is_not_sent() -> None:
    value = Tensor(
        producer="a", consumers=("b",), bytes=1, gradient_bytes=1, gradient_expanded_by="b"
    )
    graph = CostGraph(nodes=tuple(node(name, 1) for name in "abc"), tensors=(value,))
    assert set(gradient_sum_order(graph)) == {("b", "a")}
