"""What no stage holds less than, as sums over nodes: lower bounds by which a search leaves stages out unpriced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipecompile.ir.allocator import ALLOCATORS
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.plan import Recompute

__all__ = ["buffers", "floors"]


def floors(graph: CostGraph, recompute: Recompute, *, gradients: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per node, resident and per microbatch in flight, whose sums no stage's bound is below.

    A parameter counts in equal parts for the nodes that read it, with its gradient if `gradients` are there when most
    microbatches are in flight; a saved storage for its producer, whose stage keeps it until the backward: as often as
    microbatches are in flight, once if stages recompute as a whole, not at all if regions of them do.
    """
    resident, saved = ({node.name: 0 for node in graph.nodes} for _ in range(2))
    rounded = ALLOCATORS[graph.memory].rounded
    readers: dict[str, list[str]] = {}
    savers: dict[int, set[str]] = {}
    for node in graph.nodes:
        if not node.parameters:
            resident[node.name] += (1 + gradients) * rounded(node.parameter_bytes)
        for name in node.parameters:
            readers.setdefault(name, []).append(node.name)
        for storage in node.saved:
            savers.setdefault(storage, set()).add(node.name)
    for name, nodes in readers.items():
        parameter = graph.parameter_by_name[name]
        for reader in nodes:
            resident[reader] += rounded(parameter.bytes) * (1 + (parameter.trainable and gradients)) // len(nodes)
    whole = recompute in ("stage", "except-last")
    kept = resident if whole else saved
    for producer, storage in _roots(graph, savers) if whole or recompute == "none" else ():
        if graph.by_name[producer].operator != "placeholder":
            kept[producer] += rounded(graph.storages[storage])
    return resident, saved


def _roots(graph: CostGraph, savers: Mapping[int, set[str]]) -> Iterator[tuple[str, int]]:
    """Saved storages with the node that all others that make a view of them or save them come after."""
    tensors: dict[int, list[Tensor]] = {}
    for tensor in graph.tensors:
        if tensor.storage is not None:
            tensors.setdefault(tensor.storage, []).append(tensor)
    for storage, (first, *views) in tensors.items():
        after = {first.producer, *first.consumers}
        for view in views:
            after |= set(view.consumers) if view.producer in after else {""}
        if storage in savers and savers[storage] <= after and "" not in after:
            yield first.producer, storage
    for storage, nodes in savers.items():
        if storage not in tensors and len(nodes) == 1:  # what a node saves for itself, such as a mask
            yield next(iter(nodes)), storage


def buffers(graph: CostGraph, microbatches: int) -> tuple[dict[str, int], dict[str, int]]:
    """Receive buffers of values and of gradients by producer, as a stage's bound counts them."""
    rounded = ALLOCATORS[graph.memory].rounded
    arriving = {tensor.producer: microbatches * rounded(tensor.bytes) for tensor in graph.tensors}
    returning = {tensor.producer: microbatches * rounded(tensor.gradient_bytes) for tensor in graph.tensors}
    return arriving, returning
