"""Encoding offers: runs of a stage's nodes whose saved tensors may be encoded, cheapest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from pipecompile.ir.encodings import ENCODINGS, Encoding
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.stage import EncodedNodes
from pipecompile.memory_model.encoding_costs import EncodingCost
from pipecompile.memory_model.encodings import EncodedPlaces, storage_encodings
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.recompute_problem import boundaries
from pipecompile.memory_model.stage_values import StageValues

__all__ = ["EncodingOffer", "encoding_offers"]

BY_USE = frozenset({"relu", "pool"})
"""Encodings that need to know what reads a saved tensor, and so all its savers in one run."""

HOST_BYTES_PER_NS = 12
"""A GPU's link to its host: what copies of pinned memory reach over PCIe 3.0 × 16, assumed."""


class EncodingOffer(NamedTuple):
    """A run of nodes that may be encoded, and the extra ns for each byte that it frees."""

    ns_per_byte: Fraction
    encoded: EncodedNodes


class _EncodableSpan(NamedTuple):
    """Positions `start` … `stop` − 1, where `encodings` make something smaller."""

    start: int
    stop: int
    encodings: frozenset[Encoding]


def encoding_offers(
    ranges: LiveRanges, before: Iterable[str], nodes: Sequence[str], encodings: Collection[Encoding]
) -> tuple[EncodingOffer, ...]:
    """Return the runs of a stage for these encodings, without runs that free nothing.

    Each is as short as it can be. Kernels that encode take as long per byte as the fastest of the
    graph. What moves to the host on a GPU counts with the time that the run's own nodes do not
    hide. `nodes` are the stage's, in the order of the graph, `before` those of earlier stages.
    """
    places = sorted(ranges.place[name] for name in nodes)
    stage = StageValues(ranges, {ranges.place[name] for name in before}, places)
    blocks = [block_of(node.module) for node in stage.own_nodes]
    runs = []
    for span in _joined(_widened(stage, _spans(stage, encodings)), blocks):
        ordered = tuple(encoding for encoding in ENCODINGS if encoding in span.encodings)
        runs.append(EncodedPlaces(tuple(stage.nodes[span.start : span.stop]), ordered))
    offers = _priced(StageValues(ranges, stage.before, stage.nodes, (), runs), runs)
    return tuple(sorted(offers, key=lambda offer: offer.ns_per_byte))


def _spans(stage: StageValues, encodings: Collection[Encoding]) -> Iterator[_EncodableSpan]:
    """Yield for each storage that its savers could keep in fewer bytes where these are.

    Savers must be in one run for encodings by use, so that nobody else reads the storage as it is;
    for other encodings each saver is a run of its own.
    """
    by_use = frozenset(encodings) & BY_USE
    others = [
        frozenset([encoding]) for encoding in ENCODINGS if encoding in set(encodings) - by_use
    ]
    position = {place: index for index, place in enumerate(stage.nodes)}
    allocator = stage.graph.allocator
    for value in stage.stored:
        savers = [place for place in value.storage.savers if place in position]
        # A message to a later stage needs the storage as it is.
        if not savers or stage.is_sent(value.storage):
            continue
        # Half precision comes last: it is the only one that is not exact.
        for chosen in filter(None, (by_use, *others)):
            run = EncodedPlaces(
                tuple(savers), tuple(encoding for encoding in ENCODINGS if encoding in chosen)
            )
            forms, plain = storage_encodings(
                value.storage, savers, dict.fromkeys(savers, run), allocator
            )
            if (
                plain
                or sum(encoding.kept_bytes(allocator) for encoding in forms) >= value.storage.bytes
            ):
                continue
            positions = [position[place] for place in savers]
            if chosen is by_use:
                yield _EncodableSpan(positions[0], positions[-1] + 1, chosen)
            else:
                yield from (_EncodableSpan(at, at + 1, chosen) for at in positions)
            break  # the first encoding that fits counts


def _widened(stage: StageValues, spans: Iterable[_EncodableSpan]) -> Iterator[_EncodableSpan]:
    """Yield the spans widened to boundaries, without those with a node that must be in no run."""
    allowed = boundaries(stage)
    for span in spans:
        start = max(place for place in allowed if place <= span.start)
        stop = min(place for place in allowed if place >= span.stop)
        if all(node.is_recomputable for node in stage.own_nodes[start:stop]):
            yield _EncodableSpan(start, stop, span.encodings)


def _joined(spans: Iterable[_EncodableSpan], blocks: Sequence[str]) -> list[_EncodableSpan]:
    """Return overlapping spans as one, and neighbours of the same encodings in one block as one.

    Neighbours are not joined for encodings by use: these encode only when the whole run is done.
    """
    joined: list[_EncodableSpan] = []
    for span in sorted(spans, key=lambda span: span[:2]):
        # Positions 0‥1 and 2 of one block, both in half precision, become 0‥2.
        last = joined[-1] if joined else _EncodableSpan(-1, -1, frozenset())
        follows = span.start == last.stop and blocks[last.stop - 1] == blocks[span.start]
        is_alike = span.encodings == last.encodings and not span.encodings & BY_USE
        if span.start < last.stop or (follows and is_alike):
            stop = max(last.stop, span.stop)
            joined[-1] = _EncodableSpan(last.start, stop, last.encodings | span.encodings)
        else:
            joined.append(span)
    return joined


def _priced(stage: StageValues, runs: Sequence[EncodedPlaces]) -> Iterator[EncodingOffer]:
    """Yield the runs that free anything, with their time.

    A storage that several runs save is freed only if all of them encode it, so each counts with an
    equal share of its bytes and costs.
    """
    freed, moved = (
        defaultdict[EncodedPlaces, Fraction](Fraction),
        {run: _MovedBytes() for run in runs},
    )
    for value in stage.stored:
        sharers = {stage.run_at[place] for encoding in value.encodings for place in encoding.savers}
        if not stage.is_kept(value):
            for run in sharers:
                freed[run] += Fraction(value.storage.bytes, len(sharers))
        for encoding in value.encodings:
            owners = {stage.run_at[place] for place in encoding.savers}
            for run in owners:
                freed[run] -= Fraction(encoding.kept_bytes(stage.graph.allocator), len(owners))
                moved[run] = moved[run].plus(encoding.cost, len(owners))
    for run in runs:
        if freed[run] > 0:
            forward_ns, backward_ns = _times_ns(stage, run, moved[run])
            encoded = EncodedNodes(
                nodes=tuple(stage.graph.nodes[place].name for place in run.places),
                encodings=run.encodings,
                forward_ns=forward_ns,
                backward_ns=backward_ns,
            )
            yield EncodingOffer(encoded.ns / freed[run], encoded)


class _MovedBytes(NamedTuple):
    """The bytes that a run moves: by kernels that encode and decode, and to the host, one way."""

    packed: Fraction = Fraction(0)
    unpacked: Fraction = Fraction(0)
    host: Fraction = Fraction(0)

    def plus(self, cost: EncodingCost, parts: int) -> _MovedBytes:
        """Return the sum with one of so many equal parts of `cost`."""
        return _MovedBytes(
            self.packed + Fraction(cost.packing_bytes, parts),
            self.unpacked + Fraction(cost.unpacking_bytes, parts),
            self.host + Fraction(cost.host_bytes, parts),
        )


def _times_ns(stage: StageValues, run: EncodedPlaces, moved: _MovedBytes) -> tuple[int, int]:
    """Return the extra time in the forward and in the backward.

    A copy to the host runs beside the run's own nodes; only what is longer than these counts.
    """
    # Encoding is bound by memory traffic, as the graph's fastest kernels are.
    rate = stage.ranges.bytes_per_ns
    packing = ceil(moved.packed / rate) if rate else 0
    unpacking = ceil(moved.unpacked / rate) if rate else 0
    link = ceil(moved.host / HOST_BYTES_PER_NS) if stage.graph.allocator == "cuda" else 0
    nodes = [stage.graph.nodes[place] for place in run.places]
    forward = sum(node.forward_ns for node in nodes)
    backward = sum(node.backward_ns for node in nodes)
    return packing + max(0, link - forward), unpacking + max(0, link - backward)
