"""What no stage holds less than, as sums over nodes: lower bounds by which a search leaves stages out unpriced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from pipecompile.ir.encodings import POLICY_OF, Policy
from pipecompile.ir.graph import CostGraph, Node, Tensor
from pipecompile.ir.plan import Recompute
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.encodings import OTHER, EncodedPlaces, storage_encodings
from pipecompile.memory_model.live_ranges import Storage

__all__ = ["FreeableBytes", "receive_buffers", "floors", "freeable_bytes"]

CLASSES = 32  # of nodes that are told apart by what it takes to compute a byte of theirs again
RATIOS = [
    1 + Fraction(2**step, 64) for step in range(64)
]  # by which their rates are apart: as little as is possible
NO_TIME = Fraction(0)


@dataclass(frozen=True)
class FreeableBytes:
    """Bytes per node that a stage need not keep, or not as they are, for at least `rate` ns per byte."""

    rate: Fraction
    bytes: Mapping[str, int]


def bytes_lower_bounds(
    graph: CostGraph, recompute: Recompute, *, gradients: bool, encodings: Sequence[Policy] = ()
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per node, resident and per microbatch in flight, whose sums no stage's bound is below.

    A parameter counts in equal parts for the nodes that read it, with its gradient if `gradients` are there when most
    microbatches are in flight; a saved storage for its producer, whose stage keeps it until the backward: as often as
    microbatches are in flight, once if stages recompute as a whole, not at all if regions of them do, or if it may lie
    in another form by `encodings` (see `freeable`).
    """
    resident, saved = ({node.name: 0 for node in graph.nodes} for _ in range(2))
    rounded = ALLOCATORS[graph.allocator].rounded
    readers: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not node.parameters:
            resident[node.name] += (1 + gradients) * rounded(node.parameter_bytes)
        for name in node.parameters:
            readers.setdefault(name, []).append(node.name)
    for name, nodes in readers.items():
        parameter = graph.parameter_by_name[name]
        for reader in nodes:
            resident[reader] += (
                rounded(parameter.bytes) * (1 + (parameter.trainable and gradients)) // len(nodes)
            )
    whole = recompute in ("stage", "except-last")
    kept = resident if whole else saved
    for each in (
        _saved(graph, recompute, encodings) if whole or recompute in ("none", "auto") else ()
    ):
        if whole or each.is_kept:
            kept[each.producer] += each.bytes
    return resident, saved


def freeable_bytes(
    graph: CostGraph,
    recompute: Recompute,
    encodings: Sequence[Policy] = (),
    bytes_per_ns: Fraction = NO_TIME,
) -> tuple[FreeableBytes, ...]:
    """What need not be kept, the cheapest first: in regions that are computed again, or in other forms by `encodings`.

    Who frees a storage by a region runs its producer once more; who keeps it in another form moves its bytes at a rate
    of `bytes_per_ns`, or in no time if that is 0. Each storage is in one class, at the lower of both rates, so the
    least time for some bytes is found by taking class after class: a fractional knapsack, which nothing beats.
    """
    found = [
        each for each in _saved(graph, recompute, encodings) if each.bytes and not each.is_kept
    ]
    sizes: dict[str, int] = {}
    for each in found:
        sizes[each.producer] = sizes.get(each.producer, 0) + (0 if each.early else each.bytes)
    priced = [(_rate(graph, each, sizes[each.producer], bytes_per_ns), each) for each in found]
    return tuple(_classes(sorted(priced, key=lambda pair: (pair[0], pair[1].producer))))


class _Saved(NamedTuple):
    """A storage that backwards need, as its size counts, and the node that makes it.

    It may go in a region if that may run `again`: without running its producer's kernels, if it is `early`. It may lie
    in another form if bytes are `moved`, at the least.
    """

    producer: str
    bytes: int
    again: bool
    early: bool
    moved: int | None

    @property
    def is_kept(self) -> bool:
        """Whether it is kept as it is, whatever is computed again and saved."""
        return not self.again and self.moved is None


def _saved(graph: CostGraph, recompute: Recompute, encodings: Sequence[Policy]) -> Iterator[_Saved]:
    savers, least = _savers(graph), _least(graph)
    for producer, storage in _roots(graph, savers):
        node, names = graph.by_name[producer], savers[storage]
        # If others save it too its producer must run again, unless they save it in another form.
        early = node.saves_at == "before" and (
            producer in names if encodings else names == {producer}
        )
        yield _Saved(
            producer,
            ALLOCATORS[graph.allocator].rounded(least[storage]),
            again=recompute == "auto" and node.is_recomputable,
            early=early,
            moved=_moved(graph, [graph.by_name[name] for name in names], storage, encodings),
        )


def _moved(
    graph: CostGraph, nodes: Sequence[Node], storage: int, policies: Sequence[Policy]
) -> int | None:
    """The least bytes that kernels read and write so that it lies in other forms; None where none is smaller.

    Either all `nodes` that save it do so as suits their use, or some by a policy for any use: that alone counts then.
    """
    if not policies or not graph.contents or not all(node.is_recomputable for node in nodes):
        return None
    places = tuple(range(len(nodes)))
    known = [dict(zip(node.saved, node.uses, strict=False)) for node in nodes]
    uses = {place: each.get(storage, OTHER) for place, each in enumerate(known)}
    whole = Storage(graph.storages[storage], (), places, graph.contents[storage], uses)
    by_use = tuple(policy for policy in policies if policy in POLICY_OF.values())
    found = []
    for chosen in (by_use, *((policy,) for policy in policies if policy not in by_use)):
        forms, plain = storage_encodings(
            whole, places, dict.fromkeys(places, EncodedPlaces(places, chosen)), graph.allocator
        )
        if not plain and sum(form.kept(graph.allocator) for form in forms) < whole.bytes:
            found.append(sum(form.cost.packing_bytes + form.cost.unpacking_bytes for form in forms))
    return min(found, default=None)


def _rate(graph: CostGraph, saved: _Saved, together: int, bytes_per_ns: Fraction) -> Fraction:
    """The least ns per byte; `together` are the bytes that are free once the producer runs again."""
    ways = []
    if saved.again:
        ways.append(
            NO_TIME if saved.early else Fraction(graph.by_name[saved.producer].forward_ns, together)
        )
    if saved.moved is not None:
        ways.append(Fraction(saved.moved, saved.bytes) / bytes_per_ns if bytes_per_ns else NO_TIME)
    return min(ways)


def _classes(priced: Sequence[tuple[Fraction, _Saved]]) -> Iterator[FreeableBytes]:
    """In classes whose rates differ little; the lowest one counts for all of a class. What is free is one."""
    free = sum(rate == 0 for rate, _ in priced)
    rates = [rate for rate, _ in priced[free:]]
    apart = next(ratio for ratio in RATIOS if len(_begins(rates, ratio)) <= CLASSES)
    begins = [free + begin for begin in _begins(rates, apart)]
    for start, stop in pairwise([*([0] if free else []), *begins, len(priced)]):
        held: dict[str, int] = {}
        for _, each in priced[start:stop]:
            held[each.producer] = held.get(each.producer, 0) + each.bytes
        yield FreeableBytes(priced[start][0], held)


def _begins(rates: Sequence[Fraction], apart: Fraction) -> list[int]:
    """Where classes begin in which no rate is `apart` times as high as the lowest, or higher."""
    found: list[int] = []
    for index, rate in enumerate(rates):
        if not found or rate > rates[found[-1]] * apart:
            found.append(index)
    return found


def _roots(graph: CostGraph, savers: Mapping[int, set[str]]) -> Iterator[tuple[str, int]]:
    """Saved storages with the node that all others that make a view of them or save them come after; no inputs."""
    tensors: dict[int, list[Tensor]] = {}
    given = {node.name for node in graph.nodes if node.operator == "placeholder"}
    for tensor in graph.tensors:
        if tensor.storage is not None:
            tensors.setdefault(tensor.storage, []).append(tensor)
    for storage, (first, *views) in tensors.items():
        after = {first.producer, *first.consumers}
        for view in views:
            after |= set(view.consumers) if view.producer in after else {""}
        if (
            first.producer not in given
            and storage in savers
            and savers[storage] <= after
            and "" not in after
        ):
            yield first.producer, storage
    for storage, nodes in savers.items():
        if (
            storage not in tensors and len(nodes) == 1 and not nodes & given
        ):  # what it saves for itself, as a mask
            yield next(iter(nodes)), storage


def _least(graph: CostGraph) -> list[int]:
    """By storage what its stage keeps of it if others save it: itself, or the copy of a view that it sends."""
    found = list(graph.storages)
    for tensor in graph.tensors:
        if tensor.storage is not None and not tensor.is_dense:
            found[tensor.storage] = min(found[tensor.storage], tensor.bytes)
    return found


def _savers(graph: CostGraph) -> dict[int, set[str]]:
    """Saved storages with the nodes that save them."""
    found: dict[int, set[str]] = {}
    for node in graph.nodes:
        for storage in node.saved:
            found.setdefault(storage, set()).add(node.name)
    return found


def receive_buffers(graph: CostGraph, microbatches: int) -> tuple[dict[str, int], dict[str, int]]:
    """Receive buffers of values and of gradients by producer, as a stage's bound counts them."""
    rounded = ALLOCATORS[graph.allocator].rounded
    arriving = {tensor.producer: microbatches * rounded(tensor.bytes) for tensor in graph.tensors}
    returning = {
        tensor.producer: microbatches * rounded(tensor.gradient_bytes) for tensor in graph.tensors
    }
    return arriving, returning
