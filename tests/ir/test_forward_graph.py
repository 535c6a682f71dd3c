"""A cost graph without its backward."""

from __future__ import annotations

import msgspec
from hypothesis import given

from pipecompile.ir.forward_graph import forward_graph
from pipecompile.ir.graph import CostGraph
from tests.ir.cost_graphs import cost_graphs


@given(cost_graphs(wild=True))
def test_nothing_of_a_backward_is_left_and_forwards_are_as_they_were(graph: CostGraph) -> None:
    made = forward_graph(graph)
    for node, before in zip(made.nodes, graph.nodes, strict=True):
        kept = ("name", "forward_ns", "parameter_bytes", "forward_peak_bytes", "workspace_bytes")
        assert [getattr(node, name) for name in kept] == [getattr(before, name) for name in kept]
        assert not (node.backward_ns or node.saved or node.saved_bytes or node.per_step_ns)
    assert not any(tensor.gradient_bytes for tensor in made.tensors)
    assert [tensor.bytes for tensor in made.tensors] == [tensor.bytes for tensor in graph.tensors]
    assert not made.gradients and not any(p.trainable for p in made.parameters)
    assert forward_graph(made) == made


@given(cost_graphs())
def test_a_cache_by_hand_is_that_of_attentions_alone(graph: CostGraph) -> None:
    first = msgspec.structs.replace(graph.nodes[0], kv_token_bytes=512)
    made = forward_graph(msgspec.structs.replace(graph, nodes=(first, *graph.nodes[1:])), 96)
    assert [node.kv_token_bytes for node in made.nodes] == [96] + [0] * (len(graph.nodes) - 1)
