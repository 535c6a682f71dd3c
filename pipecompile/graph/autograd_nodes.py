"""Autograd's nodes: the nodes of a forward, and how they use the tensors that they save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from pipecompile.ir.encodings import Use

__all__ = ["GradientEdge", "autograd_nodes_since", "gradient_edge", "known_uses"]

GradientEdge = tuple[Node | int, int]
"""Where the gradients of a tensor are summed: its autograd node, or the id of a leaf, and which of
the node's outputs it is.
"""

# Nodes of pooling, by the number of dimensions that they pool. Of the saved input their backwards
# read the layout only.
_MAX_POOLS = {
    "MaxPool2DWithIndicesBackward0": 2,
    "MaxPool3DWithIndicesBackward0": 3,
    "AdaptiveMaxPool2DBackward0": 2,
    "AdaptiveMaxPool3DBackward0": 3,
}
_AVERAGE_POOLS = frozenset(
    {"AvgPool2DBackward0", "AvgPool3DBackward0", "AdaptiveAvgPool2DBackward0"}
)


def gradient_edge(value: Tensor) -> GradientEdge | None:
    """Return where the gradients of `value` are summed; None if it needs none."""
    if not value.requires_grad:
        return None
    return value.grad_fn or id(value), value.output_nr


def autograd_nodes_since(number: int, roots: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes with at least this sequence number that can be reached from `roots`.

    Sequence numbers grow with each node that autograd makes in this thread.
    """
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node._sequence_nr() >= number:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions if child is not None]


def known_uses(node: Any, packed_type: type[Any]) -> Iterator[tuple[object, Use, int]]:
    """Yield what saved-tensor hooks packed of each tensor that `node` saves for a known use.

    With it come the use and, for indices of pooling, the number that all of them are below. Hooks
    pack a `packed_type`, which has the `shape` of the tensor.
    """
    name = node.name()
    if name == "ReluBackward0":
        yield node._raw_saved_result.data, "relu", 0
    elif name in _AVERAGE_POOLS:
        yield node._raw_saved_self.data, "pool input", 0
    elif name in _MAX_POOLS and isinstance(image := node._raw_saved_self.data, packed_type):
        yield image, "pool input", 0
        # Indices count the elements of one pooled plane or volume.
        bound = math.prod(image.shape[-_MAX_POOLS[name] :])
        yield node._raw_saved_result1.data, "pool indices", bound
