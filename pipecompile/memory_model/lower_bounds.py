"""Lower bounds on the memory of a stage, as sums over its nodes, to skip stages that cannot fit.

The partitioner considers many more stages than it can price with `footprint_of`. These lower bounds
are sums over a stage's nodes, so it gets the bound of any set of nodes by adding. A stage whose
bound is above the cap cannot fit and is never priced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from pipecompile.ir.encodings import ENCODING_OF, Encoding
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.plan import Recompute
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.encodings import OTHER, EncodedPlaces, storage_encodings
from pipecompile.memory_model.live_ranges import Storage

__all__ = ["FreeableBytes", "bytes_lower_bounds", "freeable_bytes", "received_bytes"]

MOST_CLASSES = 32  # of nodes, by the time that it takes to free a byte of theirs
# Rates within a class differ by at most one of these factors: the smallest that gives few classes.
RATIOS = [1 + Fraction(2**step, 64) for step in range(64)]
NO_TIME = Fraction(0)


@dataclass(frozen=True)
class FreeableBytes:
    """Bytes by node that a stage can free or encode, at `rate` ns a byte or more."""

    rate: Fraction
    bytes: Mapping[str, int]


def bytes_lower_bounds(
    graph: CostGraph,
    recompute: Recompute,
    *,
    gradients: bool,
    encodings: Sequence[Encoding] = (),
    kv_tokens: int = 0,
    parts: int = 1,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by node, resident and per microbatch in flight, that no stage's bound is below.

    The bound of a stage is at least the sum of both over its nodes, the second times the
    microbatches in flight.

    A parameter is counted in equal parts at the nodes that read it, with its gradient if
    `gradients` exist when most microbatches are in flight; of several `parts` into which replicas
    divide parameters only one is counted. An attention counts its KV cache of
    `kv_tokens`. A saved storage is counted at its producer, whose stage keeps it until the
    backward:

        recompute              a saved storage counts
        none, auto             per microbatch in flight
        stage, except-last     once, as part of the one microbatch that is recomputed
        block, sqrt            not at all: regions may free it

    Under `auto`, or with `encodings`, storages that may be freed do not count; see
    `freeable_bytes`.
    """
    resident, saved = ({node.name: 0 for node in graph.nodes} for _ in range(2))
    for name, size in _parameter_bytes(graph, gradients=gradients, parts=parts):
        resident[name] += size
    for node in graph.nodes:
        resident[node.name] += ALLOCATORS[graph.allocator].rounded(kv_tokens * node.kv_token_bytes)
    is_whole = recompute in ("stage", "except-last")
    if is_whole or recompute in ("none", "auto"):
        counts = resident if is_whole else saved
        for storage in _required_storages(graph, recompute, encodings):
            if is_whole or storage.is_always_kept:
                counts[storage.producer] += storage.bytes
    return resident, saved


def _parameter_bytes(graph: CostGraph, *, gradients: bool, parts: int) -> Iterator[tuple[str, int]]:
    """Yield nodes with their parts of parameters: of three readers, each has a third."""
    rounded = ALLOCATORS[graph.allocator].rounded
    readers: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not node.parameters:
            yield node.name, (1 + gradients) * rounded(node.parameter_bytes // parts)
        for name in node.parameters:
            readers.setdefault(name, []).append(node.name)
    for name, nodes in readers.items():
        parameter = graph.parameter_by_name[name]
        copies = 1 + (parameter.trainable and gradients)
        for reader in nodes:
            yield reader, rounded(parameter.bytes // parts) * copies // len(nodes)


def received_bytes(graph: CostGraph) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a stage receives of one microbatch: values, and gradients, by producer."""
    rounded = ALLOCATORS[graph.allocator].rounded
    values = {tensor.producer: rounded(tensor.bytes) for tensor in graph.tensors}
    gradients = {tensor.producer: rounded(tensor.gradient_bytes) for tensor in graph.tensors}
    return values, gradients


def freeable_bytes(
    graph: CostGraph,
    recompute: Recompute,
    encodings: Sequence[Encoding] = (),
    bytes_per_ns: Fraction = NO_TIME,
) -> tuple[FreeableBytes, ...]:
    """Return what need not be kept, the cheapest first: recomputed in regions, or encoded.

    To free a storage by a region takes at least one more run of its producer. To encode it takes at
    least the time to move its bytes at a rate of `bytes_per_ns`, or none if that is 0. Each storage
    is in one class, at the lower of both rates. So the least time to free some bytes is found by
    taking class after class, as in a fractional knapsack. To free 50 bytes of

        class        rate            bytes
        views        0 ns a byte     20
        adds         1 ns a byte     20
        matmuls      9 ns a byte     60

    takes at least 20 · 0 + 20 · 1 + 10 · 9 = 110 ns.
    """
    freeable = [
        storage
        for storage in _required_storages(graph, recompute, encodings)
        if storage.bytes and not storage.is_always_kept
    ]
    # One run of a producer frees all its storages, except those that need no run of its kernels.
    freed_by_run: dict[str, int] = {}
    for storage in freeable:
        size = 0 if storage.is_saved_before else storage.bytes
        freed_by_run[storage.producer] = freed_by_run.get(storage.producer, 0) + size
    priced = [
        (_rate(graph, storage, freed_by_run[storage.producer], bytes_per_ns), storage)
        for storage in freeable
    ]
    return tuple(_classes(sorted(priced, key=lambda pair: (pair[0], pair[1].producer))))


class _RequiredStorage(NamedTuple):
    """A storage that backwards need, with its size as a bound counts it and the node that makes it.

    It may lie in a recomputed region if `is_recomputable`; without a run of its producer's kernels,
    if it `is_saved_before` they run. It may be encoded if at least `moved` bytes are read and
    written for that, and not if that is None.
    """

    producer: str
    bytes: int
    is_recomputable: bool
    is_saved_before: bool
    moved: int | None

    @property
    def is_always_kept(self) -> bool:
        """Whether it is kept as it is, whatever is recomputed and encoded."""
        return not self.is_recomputable and self.moved is None


def _required_storages(
    graph: CostGraph, recompute: Recompute, encodings: Sequence[Encoding]
) -> Iterator[_RequiredStorage]:
    savers, sizes = _savers(graph), _least_sizes(graph)
    for producer, storage in _roots(graph, savers):
        node, names = graph.by_name[producer], savers[storage]
        # If others save it too, its producer must be recomputed, unless they may encode it.
        is_only_saver = producer in names if encodings else names == {producer}
        yield _RequiredStorage(
            producer,
            ALLOCATORS[graph.allocator].rounded(sizes[storage]),
            is_recomputable=recompute == "auto" and node.is_recomputable,
            is_saved_before=node.saves_at == "before" and is_only_saver,
            moved=_moved_bytes(graph, [graph.by_name[name] for name in names], storage, encodings),
        )


def _moved_bytes(
    graph: CostGraph, nodes: Sequence[Node], storage: int, encodings: Sequence[Encoding]
) -> int | None:
    """Return the least bytes that are read and written to encode a storage that `nodes` save.

    Either all of them encode it as suits their use of it, or some do by an encoding for any use;
    then that one alone counts. None if no encoding is smaller than the storage.
    """
    if not encodings or not graph.contents or not all(node.is_recomputable for node in nodes):
        return None
    places = tuple(range(len(nodes)))
    known_uses = [dict(zip(node.saved, node.uses, strict=False)) for node in nodes]
    uses = {place: known.get(storage, OTHER) for place, known in enumerate(known_uses)}
    whole = Storage(graph.storages[storage], (), places, graph.contents[storage], uses)
    # A relaxation: savers are priced as one run, however a stage would choose its runs.
    by_use = tuple(encoding for encoding in encodings if encoding in ENCODING_OF.values())
    for_any_use = [(encoding,) for encoding in encodings if encoding not in by_use]
    moved = []
    for chosen in (by_use, *for_any_use):
        runs = dict.fromkeys(places, EncodedPlaces(places, chosen))
        forms, plain = storage_encodings(whole, places, runs, graph.allocator)
        kept = sum(encoding.kept_bytes(graph.allocator) for encoding in forms)
        if not plain and kept < whole.bytes:
            costs = [encoding.cost for encoding in forms]
            moved.append(sum(cost.packing_bytes + cost.unpacking_bytes for cost in costs))
    return min(moved, default=None)


def _rate(
    graph: CostGraph, saved: _RequiredStorage, freed_by_run: int, bytes_per_ns: Fraction
) -> Fraction:
    """Return the least ns per byte; one more run of the producer frees `freed_by_run` bytes."""
    rates = []
    if saved.is_recomputable:
        run_ns = graph.by_name[saved.producer].forward_ns
        rates.append(NO_TIME if saved.is_saved_before else Fraction(run_ns, freed_by_run))
    if saved.moved is not None:
        moved_per_byte = Fraction(saved.moved, saved.bytes)
        rates.append(moved_per_byte / bytes_per_ns if bytes_per_ns else NO_TIME)
    return min(rates)


def _classes(priced: Sequence[tuple[Fraction, _RequiredStorage]]) -> Iterator[FreeableBytes]:
    """Yield classes of storages, given in ascending order of rates, whose rates differ little.

    The lowest rate counts for all of a class, so that bounds stay bounds. Storages that are free to
    recompute are a class of their own.
    """
    free = sum(rate == 0 for rate, _ in priced)
    rates = [rate for rate, _ in priced[free:]]
    ratio = next(ratio for ratio in RATIOS if len(_class_begins(rates, ratio)) <= MOST_CLASSES)
    begins = [free + begin for begin in _class_begins(rates, ratio)]
    for start, stop in pairwise([*([0] if free else []), *begins, len(priced)]):
        sizes: dict[str, int] = {}
        for _, storage in priced[start:stop]:
            sizes[storage.producer] = sizes.get(storage.producer, 0) + storage.bytes
        yield FreeableBytes(priced[start][0], sizes)


def _class_begins(rates: Sequence[Fraction], ratio: Fraction) -> list[int]:
    """Return where classes begin, in which no rate is above `ratio` times the lowest."""
    begins: list[int] = []
    for index, rate in enumerate(rates):
        if not begins or rate > rates[begins[-1]] * ratio:
            begins.append(index)
    return begins


def _roots(graph: CostGraph, savers: Mapping[int, set[str]]) -> Iterator[tuple[str, int]]:
    """Yield saved storages with the node that makes them, where a stage that keeps them is known.

    It is known if all that view or save the storage come after that node: then its stage has it.
    Inputs of the minibatch are buffers, and left out.
    """
    placeholders = {node.name for node in graph.nodes if node.operator == "placeholder"}
    tensors: dict[int, list[Tensor]] = {}
    for tensor in graph.tensors:
        if tensor.storage is not None:
            tensors.setdefault(tensor.storage, []).append(tensor)
    # A view of a view is known if its producer is a reader of one that is known already.
    for storage, (first, *views) in tensors.items():
        if first.producer in placeholders or storage not in savers:
            continue
        after = {first.producer, *first.consumers}
        is_known = True
        for view in views:
            is_known = is_known and view.producer in after
            after |= set(view.consumers)
        if is_known and savers[storage] <= after:
            yield first.producer, storage
    for storage, nodes in savers.items():
        # What one node saves for itself, a mask for example.
        if storage not in tensors and len(nodes) == 1 and not nodes & placeholders:
            yield next(iter(nodes)), storage


def _least_sizes(graph: CostGraph) -> list[int]:
    """Return by storage what its stage keeps if others save it: all, or the copy of a sent view."""
    sizes = list(graph.storages)
    for tensor in graph.tensors:
        if tensor.storage is not None and not tensor.is_dense:
            sizes[tensor.storage] = min(sizes[tensor.storage], tensor.bytes)
    return sizes


def _savers(graph: CostGraph) -> dict[int, set[str]]:
    """Return the nodes that save each saved storage."""
    savers: dict[int, set[str]] = {}
    for node in graph.nodes:
        for storage in node.saved:
            savers.setdefault(storage, set()).add(node.name)
    return savers
