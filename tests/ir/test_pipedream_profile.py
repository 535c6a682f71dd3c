"""Profiles of PipeDream's profiler: what becomes of each line, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.errors import FormatError
from pipecompile.ir.pipedream_profile import cost_graph_in, cost_graph_of_profile
from pipecompile.ir.serialization import encode

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "profiles"


def _figures(**changed: str) -> str:
    names = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    return ", ".join(f"{name}={changed.get(name, '1.0')}" for name in names)


LINES = "\n".join(
    [
        "node3 -- LSTM(2, 2) -- "
        + _figures(backward_compute_time="0.003", activation_size="[8.0; 2.0]"),
        "node1 -- Input0 -- " + _figures(forward_compute_time="9.000"),
        "node2 -- Embedding(4, 2) -- "
        + _figures(forward_compute_time="0.001", activation_size="16.0", parameter_size="32.000"),
        "",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node3",
    ]
)


def test_layers_are_nodes_in_the_order_of_the_forward() -> None:
    graph = cost_graph_of_profile(LINES)
    first, second = graph.nodes
    assert (first.name, first.forward_ns, first.parameter_bytes) == ("node2", 1000, 32)
    assert (second.name, second.backward_ns, second.saved_bytes) == ("node3", 3000, 10)
    assert second.operator == "LSTM(2, 2)"


def test_edges_are_tensors_and_inputs_are_not() -> None:
    (tensor,) = cost_graph_of_profile(LINES).tensors
    assert (tensor.producer, tensor.consumers) == ("node2", ("node3",))
    assert (tensor.bytes, tensor.gradient_bytes) == (16, 16)


@pytest.mark.parametrize(("name", "nodes"), [("vgg16", 40), ("gnmt", 45)])
def test_published_profiles_are_read(name: str, nodes: int) -> None:
    graph = cost_graph_in(PUBLISHED / f"pipedream_{name}.txt")
    assert len(graph.nodes) == nodes
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    for tensor in graph.tensors:
        assert all(order[tensor.producer] < order[reader] for reader in tensor.consumers)


def test_the_published_vgg16_adds_up() -> None:
    """The sum of all weights is the 138,357,544 of VGG-16, in float32."""
    graph = cost_graph_in(PUBLISHED / "pipedream_vgg16.txt")
    assert sum(node.parameter_bytes for node in graph.nodes) == 4 * 138_357_544


def test_a_cost_graph_is_read_as_before(tmp_path: Path) -> None:
    graph = cost_graph_of_profile(LINES)
    (path := tmp_path / "graph.json").write_bytes(encode(graph))
    assert cost_graph_in(path) == graph


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 -- Input -- " + _figures(), "there is no layer in it"),
        ("node1 -- ReLU -- " + _figures() + "\n\tnode1 -- node7", "an edge names node7"),
        ("node1 -- ReLU", "an edge names node1"),
        ("node1 -- ReLU -- forward_compute_time=1.0", "line 1: backward_compute_time is missing"),
        ("node1 -- ReLU -- " + _figures(activation_size="x"), "line 1: activation_size=x is not"),
        ("node1 -- ReLU -- " + _figures(forward_compute_time="nan"), "forward_compute_time=nan is"),
        ("node1 -- ReLU -- " + _figures(parameter_size="-1"), "parameter_size=-1 is not a size"),
        ("node1 alone", "line 1: 'node1 alone' is neither a layer nor an edge"),
        (
            "\n".join(f"node{i} -- ReLU -- {_figures()}" for i in (1, 2))
            + "\n\tnode1 -- node2\n\tnode2 -- node1",
            "these read one another",
        ),
        (f"node1 -- ReLU -- {_figures()}\n" * 2, "line 2: 'node1 -- ReLU -- forward"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        cost_graph_of_profile(text)
