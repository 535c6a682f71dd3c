"""Pairs of nodes that must keep their order in stages, so that gradients are summed bit for bit.

`api` passes them to the partitioner as `precedence`, for plans only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipecompile.ir.graph import CostGraph

__all__ = ["gradient_sum_order"]


def gradient_sum_order(graph: CostGraph) -> Iterator[tuple[str, str]]:
    """Yield pairs (a, b) of nodes: a must lie in no later stage than b.

    Autograd sums the gradients of a tensor's readers from the last reader in the forward to the
    first. A pipeline adds the sum of the later stages before the terms of the tensor's own stage.
    Both orders agree if the stages of the readers do not fall. Floating-point addition is
    commutative, so the first two terms may change places: readers a, b, c, d give the pairs (a, b),
    (b, c), (b, d).

    A gradient that repeats elements (`expanded_by`) must not be sent: the node that expands it and
    the tensor's producer share a stage.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    parameter_readers = {
        parameter.name: list[str]() for parameter in graph.parameters if parameter.trainable
    }
    for node in graph.nodes:
        for name in parameter_readers.keys() & set(node.parameters):
            parameter_readers[name].append(node.name)
    tensor_readers = [
        sorted(set(tensor.consumers), key=position.__getitem__)
        for tensor in graph.tensors
        if tensor.gradient_bytes
    ]
    for readers in (*tensor_readers, *parameter_readers.values()):
        if len(readers) > 2:
            yield from pairwise(readers[:-1])
            yield readers[-3], readers[-1]
    for tensor in graph.tensors:
        if tensor.gradient_expanded_by is not None:
            # The expanding node reads the tensor, so this pair forces both into one stage.
            yield tensor.gradient_expanded_by, tensor.producer
