"""The cost graph of a model that only runs forward, from that of its training step."""

from __future__ import annotations

from msgspec.structs import replace

from pipecompile.ir.graph import CostGraph, Node, Tensor

__all__ = ["forward_graph"]


def forward_graph(graph: CostGraph, kv_token_bytes: int | None = None) -> CostGraph:
    """Return what a forward without a backward costs: no node has a backward, saves anything or
    does work once a step, no tensor has a gradient, and no parameter is trained.

    Where it is given, each attention adds `kv_token_bytes` to a KV cache for a token.
    """
    return replace(
        graph,
        nodes=tuple(_forward_node(node, kv_token_bytes) for node in graph.nodes),
        tensors=tuple(map(_forward_tensor, graph.tensors)),
        parameters=tuple(replace(parameter, trainable=False) for parameter in graph.parameters),
        gradients=(),
        # Without a backward nothing is recomputed, so no nodes need go together.
        recomputed_together=(),
    )


def _forward_node(node: Node, kv_token_bytes: int | None) -> Node:
    is_attention = node.kv_token_bytes > 0
    return replace(
        node,
        backward_ns=0,
        # Whole backwards take no time, and there are no halves of them.
        backward_input_ns=None,
        backward_weight_ns=None,
        per_step_ns=0,
        backward_peak_bytes=0,
        saved_bytes=0,
        saved=(),
        uses=(),
        saves_at="never",
        view_gradients=(),
        gradients_by_input_backward=(),
        has_ordered_gradients=False,
        kv_token_bytes=kv_token_bytes if is_attention and kv_token_bytes else node.kv_token_bytes,
    )


def _forward_tensor(tensor: Tensor) -> Tensor:
    return replace(
        tensor,
        gradient_bytes=0,
        gradient_expanded_by=None,
        sums_with=None,
        sums_with_parameter=None,
        consumers_without_gradient=(),
    )
