"""What no stage holds less than, as sums over nodes: lower bounds by which a search leaves stages out unpriced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from pipecompile.ir.allocator import ALLOCATORS
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.plan import Recompute

__all__ = ["Freeable", "buffers", "floors", "freeable"]

CLASSES = 32  # of nodes that are told apart by what it takes to compute a byte of theirs again
RATIOS = [1 + Fraction(2**step, 64) for step in range(64)]  # by which their rates are apart: as little as is possible


@dataclass(frozen=True)
class Freeable:
    """Bytes per node that a stage may compute again instead of keeping them, for at least `rate` ns per byte."""

    rate: Fraction
    bytes: Mapping[str, int]


def floors(graph: CostGraph, recompute: Recompute, *, gradients: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per node, resident and per microbatch in flight, whose sums no stage's bound is below.

    A parameter counts in equal parts for the nodes that read it, with its gradient if `gradients` are there when most
    microbatches are in flight; a saved storage for its producer, whose stage keeps it until the backward: as often as
    microbatches are in flight, once if stages recompute as a whole, not at all if regions of them do (see `freeable`).
    """
    resident, saved = ({node.name: 0 for node in graph.nodes} for _ in range(2))
    rounded = ALLOCATORS[graph.memory].rounded
    readers: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not node.parameters:
            resident[node.name] += (1 + gradients) * rounded(node.parameter_bytes)
        for name in node.parameters:
            readers.setdefault(name, []).append(node.name)
    for name, nodes in readers.items():
        parameter = graph.parameter_by_name[name]
        for reader in nodes:
            resident[reader] += rounded(parameter.bytes) * (1 + (parameter.trainable and gradients)) // len(nodes)
    whole = recompute in ("stage", "except-last")
    kept = resident if whole else saved
    for producer, storage in _roots(graph, _savers(graph)) if whole or recompute in ("none", "auto") else ():
        if recompute != "auto" or not graph.by_name[producer].again:
            kept[producer] += rounded(graph.storages[storage])
    return resident, saved


def freeable(graph: CostGraph) -> tuple[Freeable, ...]:
    """What regions computed again may free, the cheapest first: who frees a storage runs its producer once more.

    Each node's bytes are in one class, so the least time for some bytes is found by taking class after class: a
    fractional knapsack, which no choice of regions beats.
    """
    rounded = ALLOCATORS[graph.memory].rounded
    savers = _savers(graph)
    sizes: dict[str, int] = {}
    free: dict[str, int] = {}  # saved by their producer alone, before its kernels run: no need to run them again
    for producer, storage in _roots(graph, savers):
        node = graph.by_name[producer]
        if node.again:
            early = node.packs == "before" and savers[storage] == {producer}
            into = free if early else sizes
            into[producer] = into.get(producer, 0) + rounded(graph.storages[storage])
    rates = {name: Fraction(graph.by_name[name].forward_ns, size) for name, size in sizes.items() if size}
    classes = [Freeable(Fraction(0), free)] if free else []
    return (*classes, *_classes(rates, sizes))


def _classes(rates: Mapping[str, Fraction], sizes: Mapping[str, int]) -> Iterator[Freeable]:
    """Nodes by rate, in classes whose rates differ little; the lowest one counts for all of a class."""
    order = sorted(rates, key=lambda name: (rates[name], name))
    apart = next(ratio for ratio in RATIOS if len(_begins(order, rates, ratio)) <= CLASSES)
    begins = _begins(order, rates, apart)
    for start, stop in pairwise([*begins, len(order)] if begins else []):
        yield Freeable(rates[order[start]], {name: sizes[name] for name in order[start:stop]})


def _begins(order: Sequence[str], rates: Mapping[str, Fraction], apart: Fraction) -> list[int]:
    """Where classes begin in which no rate is `apart` times as high as the lowest, or higher."""
    found: list[int] = []
    for index, name in enumerate(order):
        if not found or rates[name] > rates[order[found[-1]]] * apart:
            found.append(index)
    return found


def _roots(graph: CostGraph, savers: Mapping[int, set[str]]) -> Iterator[tuple[str, int]]:
    """Saved storages with the node that all others that make a view of them or save them come after; no inputs."""
    tensors: dict[int, list[Tensor]] = {}
    for tensor in graph.tensors:
        if tensor.storage is not None:
            tensors.setdefault(tensor.storage, []).append(tensor)
    for storage, (first, *views) in tensors.items():
        after = {first.producer, *first.consumers}
        for view in views:
            after |= set(view.consumers) if view.producer in after else {""}
        made = graph.by_name[first.producer].operator != "placeholder"
        if made and storage in savers and savers[storage] <= after and "" not in after:
            yield first.producer, storage
    for storage, nodes in savers.items():
        if storage not in tensors and len(nodes) == 1:  # what a node saves for itself, such as a mask
            yield next(iter(nodes)), storage


def _savers(graph: CostGraph) -> dict[int, set[str]]:
    """Saved storages with the nodes that save them."""
    found: dict[int, set[str]] = {}
    for node in graph.nodes:
        for storage in node.saved:
            found.setdefault(storage, set()).add(node.name)
    return found


def buffers(graph: CostGraph, microbatches: int) -> tuple[dict[str, int], dict[str, int]]:
    """Receive buffers of values and of gradients by producer, as a stage's bound counts them."""
    rounded = ALLOCATORS[graph.memory].rounded
    arriving = {tensor.producer: microbatches * rounded(tensor.bytes) for tensor in graph.tensors}
    returning = {tensor.producer: microbatches * rounded(tensor.gradient_bytes) for tensor in graph.tensors}
    return arriving, returning
