"""Cost graphs whose nodes follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.graph import CostGraph, Node, Tensor

__all__ = ["chain"]


def chain(times: Sequence[tuple[int, int]], sizes: Sequence[int]) -> CostGraph:
    """Nodes one after the other: forward and backward of each, and what it sends."""
    nodes = tuple(
        Node(
            name=f"n{index}",
            forward_ns=forward,
            backward_ns=backward,
            parameter_bytes=0,
            saved_bytes=0,
            group=None,
        )
        for index, (forward, backward) in enumerate(times)
    )
    tensors = tuple(
        Tensor(producer=f"n{index}", consumers=(f"n{index + 1}",), bytes=size, gradient_bytes=size)
        for index, size in enumerate(sizes[: len(times) - 1])
    )
    return CostGraph(nodes=nodes, tensors=tensors)
