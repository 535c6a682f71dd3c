"""Tensors that several layers read, such as a mask or an index that layers share, and which
boundaries of a cut send them.

What a layer hands to the next one crosses every boundary between the two; that is the data flow of
any cut. A tensor that later layers read too is sent on by every stage in between:

    layer      0     1     2     3          index is made in layer 0 and read up to layer 2:
    index      ●─────▶─────▶                a boundary after layer 0 or 1 sends it, one after
    hidden     ●────▶●────▶●────▶           layer 2 does not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecompile.ir.audit import SharedTensor
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.layouts.sections import Section

__all__ = ["shared_tensors"]

BEFORE = -1  # the place of what is made before the layers


def shared_tensors(
    graph: CostGraph, sections: Sequence[Section | None], assignment: Mapping[str, int]
) -> list[SharedTensor]:
    """Return the tensors that more than the next layer reads, and that a cut sends, the largest
    first.

    `sections` are those of the nodes by layers. What follows the layers counts as one more layer.
    """
    layer_of = _layers(graph, sections)
    last_layer = max(layer_of.values())
    found = []
    for tensor in graph.tensors:
        made, read = layer_of[tensor.producer], _last_reader(tensor, layer_of)
        stages = [assignment[name] for name in (tensor.producer, *tensor.consumers)]
        # Made in stage 0 and read up to stage 2: it crosses the boundaries before 1 and before 2.
        before = tuple(range(min(stages) + 1, max(stages) + 1))
        if read > made + 1 and before and tensor.bytes:
            found.append(
                SharedTensor(
                    name=tensor.producer,
                    module=graph.by_name[tensor.producer].module,
                    first=made,
                    last=read,
                    before=before,
                    bytes=tensor.bytes,
                    gradient_bytes=tensor.gradient_bytes,
                    spans_all=made == BEFORE and read >= last_layer - 1,
                )
            )
    # By what they send in all: forward at each boundary, and back.
    return sorted(found, key=lambda each: -len(each.before) * (each.bytes + each.gradient_bytes))


def _layers(graph: CostGraph, sections: Sequence[Section | None]) -> dict[str, int]:
    """Return the number of each node's layer: −1 before the layers, one more than all behind."""
    last = max(section.number for section in sections if section and section.symbol == "t")
    layers, current = {}, BEFORE
    for node, section in zip(graph.nodes, sections, strict=True):
        if section is not None:
            places = {"E": BEFORE, "t": section.number}
            current = places.get(section.symbol, last + 1)
        # What no symbol names is where the forward is: between the layers beside it.
        layers[node.name] = BEFORE if section is None and current == BEFORE else current
    return layers


def _last_reader(tensor: Tensor, layer_of: Mapping[str, int]) -> int:
    return max((layer_of[name] for name in tensor.consumers), default=BEFORE)
