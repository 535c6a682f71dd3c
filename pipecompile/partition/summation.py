"""Pairs of nodes whose stages must not fall, so that gradients are summed as in the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipecompile.ir.graph import CostGraph

__all__ = ["sums_in_order"]


def sums_in_order(graph: CostGraph) -> Iterator[tuple[str, str]]:
    """Pairs of nodes whose stages must not fall, so that gradients are summed in the order of the unsplit model.

    A gradient that repeats elements must not be sent: its node and the reader share a stage.
    Autograd adds what the readers of a tensor or a parameter give from the last in the forward to the first, and what
    later stages give comes before what the tensor's own stage adds. Only the first two summands may change places.
    """
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    readers = {parameter.name: list[str]() for parameter in graph.parameters if parameter.trainable}
    for node in graph.nodes:
        for name in readers.keys() & set(node.parameters):
            readers[name].append(node.name)
    consumers = [
        sorted(set(t.consumers), key=place.__getitem__) for t in graph.tensors if t.gradient_bytes
    ]
    for summands in (*consumers, *readers.values()):
        if len(summands) > 2:
            yield from pairwise(summands[:-1])
            yield summands[-3], summands[-1]
    for tensor in graph.tensors:
        if tensor.expanded_by is not None:
            yield tensor.expanded_by, tensor.producer
