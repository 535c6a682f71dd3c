"""Pairs of nodes that must keep their order in stages, so that gradients are summed bit for bit.

`planner/partition_problem.py` passes them to the partitioner, for plans only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pipecompile.ir.graph import CostGraph

__all__ = ["gradient_sum_order"]


@dataclass
class _GradientSum:
    """The nodes whose gradients are added up for one tensor or parameter. Those in `returning`
    return it unchanged, and their readers count as its readers.
    """

    readers: set[str] = field(default_factory=set)
    returning: set[str] = field(default_factory=set)


def gradient_sum_order(graph: CostGraph) -> Iterator[tuple[str, str]]:
    """Yield pairs (a, b) of nodes: a must lie in no later stage than b.

    Autograd sums the gradients of a tensor's readers from the last reader in the forward to the
    first. A pipeline adds the sum of the later stages before the terms of the tensor's own stage.
    Both orders agree if the stages of the readers do not fall. Floating-point addition is
    commutative, so the first two terms may change places: readers a, b, c, d give the pairs (a, b),
    (b, c), (b, d). If c or d gives several terms, or one that lies in memory otherwise than the
    tensor, as the sum does that begins with it, then (c, d) is a pair as well.

    A gradient that repeats elements (`expanded_by`) must not be sent: the node that expands it and
    the tensor's producer share a stage.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    for each in _sums(graph):
        readers = sorted(each.readers, key=position.__getitem__)
        is_last_free = not any(graph.by_name[r].has_ordered_gradients for r in readers[-2:])
        if is_last_free and len(readers) < 3:
            continue
        yield from pairwise(readers[:-1] if is_last_free else readers)
        if is_last_free:
            yield readers[-3], readers[-1]
        # For y = dropout(x) of 0: earlier stages then read x alone, and later ones y alone.
        for node in sorted(each.returning, key=position.__getitem__):
            yield from ((reader, node) for reader in readers if position[reader] < position[node])
    for tensor in graph.tensors:
        if tensor.gradient_expanded_by is not None:
            # The expanding node reads the tensor, so this pair forces both into one stage.
            yield tensor.gradient_expanded_by, tensor.producer


def _sums(graph: CostGraph) -> Iterator[_GradientSum]:
    """Yield the sums of gradients that a step makes, of tensors and of parameters."""
    of_tensors: dict[str, _GradientSum] = defaultdict(_GradientSum)
    of_parameters = {each.name: _GradientSum() for each in graph.parameters if each.trainable}
    for node in graph.nodes:
        for name in of_parameters.keys() & set(node.parameters):
            of_parameters[name].readers.add(node.name)
    for tensor in graph.tensors:
        if tensor.gradient_bytes:
            each = of_tensors[tensor.sums_with or tensor.producer]
            if tensor.sums_with_parameter in of_parameters:
                each = of_parameters[tensor.sums_with_parameter]
            each.readers.update(tensor.consumers)
            if tensor.sums_with or tensor.sums_with_parameter:
                each.returning.add(tensor.producer)
    for each in (*of_tensors.values(), *of_parameters.values()):
        each.readers -= each.returning
        yield each
