"""What one stage holds, by position: the problem that a choice of recompute regions solves.

The searches in recompute/ ask for many regions of one stage. Calling stage.py for each of them
would take too long, so this describes the stage once: every storage with the positions of its
users, and by position what else lives in the forward and in the backward. region_search.py adds
these up to the same peaks as stage.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import NamedTuple

from pipecompile.ir.encodings import Encoding
from pipecompile.memory_model.encodings import EncodedPlaces, StorageEncoding
from pipecompile.memory_model.gradient_sums import GradientSums
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.stage_values import (
    BOUND_WORKSPACE,
    Counting,
    StageValues,
    StoredValue,
)
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["RecomputeProblem", "StoredTensor", "boundaries", "recompute_problem_of"]


@dataclass(frozen=True)
class StoredTensor:
    """A storage by the positions of a stage's nodes: who produces, uses and saves it.

    `producer` is −1 for what is there before the first node. `uses` read it or save it in the
    forward, `savers` keep it for their backward. What `is_sent` to later stages is held until the
    backward ends, whatever is recomputed. What is copied for later stages lives until the position
    `copied_at`, the stage's last, is done and the copies are made.
    """

    bytes: int
    producer: int
    uses: tuple[int, ...]
    savers: tuple[int, ...]
    is_sent: bool
    copied_at: int | None = None

    @property
    def last_use(self) -> int:
        """The last position that needs it in the forward."""
        if self.copied_at is not None:
            return self.copied_at
        return max((*self.uses, *self.savers), default=self.producer)


@dataclass(frozen=True)
class RecomputeProblem:
    """What a choice of recompute must know of a stage, by position 0 … n − 1 of its nodes.

    Bytes are those of one microbatch, as a bound counts them. `saves_at` says when a node's forward
    hands tensors to its backward: "before" its kernels run, "after" them, or "never".
    `forward_peak` is what must be free when a node's forward begins. `backward_peak` is what must
    be free when its backward begins: gradients and workspace, of which `gradients_before` live
    already, and `gradients_after` live when it is done, sums of gradients included. What the
    forward kept comes on top of these.

    A region keeps `buffer_copies` of the buffers that its nodes write to. Regions begin and end at
    `boundaries`, among 0 … n, and contain none of the `excluded` positions. When the last node is
    done, `sent_copies` bytes of copies are made for later stages.
    """

    forward_ns: tuple[int, ...]
    saves_at: tuple[str, ...]
    forward_peak: tuple[int, ...]
    gradients_before: tuple[int, ...]
    backward_peak: tuple[int, ...]
    gradients_after: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    buffer_copies: tuple[int, ...]
    boundaries: tuple[int, ...]
    excluded: frozenset[int] = frozenset()
    sent_copies: int = 0

    @cached_property
    def sent_bytes(self) -> int:
        """What is held for later stages."""
        return self.sent_copies + sum(t.bytes for t in self.tensors if t.is_sent)


def recompute_problem_of(
    ranges: LiveRanges,
    before: Iterable[str],
    nodes: Iterable[str],
    *,
    has_gradients: bool,
    encoded_runs: Iterable[tuple[Iterable[str], tuple[Encoding, ...]]] = (),
) -> RecomputeProblem:
    """Return the problem for the stage of `nodes`; nodes `before` it are in earlier stages.

    It is for the first backward of a step, or for a later one, in which gradients of parameters
    exist. `encoded_runs` are as in `footprint_of`; their nodes are in no region.
    """
    place = ranges.place
    runs = [
        EncodedPlaces(tuple(sorted(place[name] for name in names)), encodings)
        for names, encodings in encoded_runs
    ]
    places = sorted(place[name] for name in nodes)
    stage = StageValues(ranges, {place[name] for name in before}, places, (), runs)
    return _problem(stage, has_gradients=has_gradients)


def _problem(stage: StageValues, *, has_gradients: bool) -> RecomputeProblem:
    """Return the problem of a stage: times, and bytes as a bound, by the position of its nodes."""
    counting = Counting(BOUND_WORKSPACE, stage.allocator.rounded)
    position = {place: index for index, place in enumerate(stage.nodes)}
    levels = _gradient_levels(stage, counting, has_gradients=has_gradients)
    encodings = _EncodedBytes(stage, position, counting)
    values = (*stage.strided_copies, *stage.stored)
    return RecomputeProblem(
        forward_ns=tuple(node.forward_ns for node in stage.own_nodes),
        saves_at=tuple(node.saves_at for node in stage.own_nodes),
        forward_peak=tuple(map(add, _forward_peaks(stage, counting), encodings.forward)),
        gradients_before=tuple(map(add, levels.before, encodings.before)),
        backward_peak=tuple(map(add, levels.peak, encodings.peak)),
        gradients_after=tuple(map(add, levels.after, encodings.after)),
        tensors=(
            *(_stored_tensor(stage, value, position, counting) for value in values),
            *encodings.tensors,
        ),
        buffer_copies=tuple(
            sum(map(counting.size_of, node.buffer_copies)) for node in stage.own_nodes
        ),
        boundaries=boundaries(stage),
        excluded=frozenset(
            position[place]
            for place in stage.nodes
            if place in stage.run_at or not stage.graph.nodes[place].is_recomputable
        ),
        sent_copies=sum(counting.size_of(tensor.bytes) for tensor in stage.sent_copies),
    )


def _forward_peaks(stage: StageValues, counting: Counting) -> list[int]:
    """Return by position what a node's forward needs: rise, workspace, and padding."""
    peaks = []
    for place, node in zip(stage.nodes, stage.own_nodes, strict=True):
        # The peak is in bytes that are asked for, but the node's storages are rounded up.
        storages = stage.ranges.storages.get(place, ())
        padding = sum(counting.size_of(s.bytes) - s.bytes for s in storages)
        peaks.append(counting.needed(node.forward_peak_bytes, node.workspace_bytes) + padding)
    return peaks


def _stored_tensor(
    stage: StageValues, value: StoredValue, position: Mapping[int, int], counting: Counting
) -> StoredTensor:
    """Return a stored value by positions; savers that encode it keep something else instead."""
    # What is freed in the forward at a later node than its last reader is used there.
    storage = value.storage
    encoded = {place for encoding in value.encodings for place in encoding.savers}
    is_copied = stage.is_sent_as_copy(storage)
    last_use = () if is_copied else (value.last_forward_use,)
    uses = sorted({*storage.readers, *last_use} - {value.place})
    return StoredTensor(
        bytes=counting.size_of(storage.bytes),
        producer=position.get(value.place, -1),
        uses=tuple(position[place] for place in uses if place in position),
        savers=tuple(
            position[place]
            for place in storage.savers
            if place in position and place not in encoded
        ),
        is_sent=stage.is_sent(storage),
        copied_at=len(stage.nodes) - 1 if is_copied else None,
    )


class _EncodedBytes:
    """What encodings add: themselves as tensors, and by position what lives besides."""

    def __init__(self, stage: StageValues, position: Mapping[int, int], counting: Counting) -> None:
        count = len(stage.nodes)
        self.forward, self.before, self.peak, self.after = ([0] * count for _ in range(4))
        self.tensors: list[StoredTensor] = []
        for value in stage.stored:
            for encoding in value.encodings:
                self._add(stage, encoding, position, counting)

    def _add(
        self,
        stage: StageValues,
        encoding: StorageEncoding,
        position: Mapping[int, int],
        counting: Counting,
    ) -> None:
        """Count the encoded form of a saved tensor from its forward to its backward, and the full
        form while the backward needs it.
        """
        savers = tuple(position[place] for place in encoding.savers)
        kept = counting.size_of(encoding.kept_bytes(stage.graph.allocator))
        workspace = counting.size_of(encoding.cost.workspace_bytes)
        self.tensors.append(StoredTensor(kept, savers[0], (), savers, is_sent=False))
        # A node may make several encodings one after the other; as a bound, all count at once.
        self.forward[position[encoding.encoded_at]] += kept + workspace
        decoded_at = position[encoding.decoded_at]
        self._add_decoded(counting.size_of(encoding.storage_bytes), savers[0], decoded_at)
        self.peak[decoded_at] += workspace

    def _add_decoded(self, size: int, first: int, decoded_at: int) -> None:
        """Add a decoded storage: there from the backward at `decoded_at` to that at `first`.

        position      first      ·      decoded_at
        before          +        +
        peak            +        +          +
        after                    +          +          (backwards run from right to left)
        """
        for position in range(first, decoded_at + 1):
            self.peak[position] += size
            if position < decoded_at:
                self.before[position] += size
            if position > first:
                self.after[position] += size


class _GradientLevels(NamedTuple):
    """By position the bytes of gradients before a node's backward, at its peak, and after it."""

    before: tuple[int, ...]
    peak: tuple[int, ...]
    after: tuple[int, ...]


def _gradient_levels(
    stage: StageValues, counting: Counting, *, has_gradients: bool
) -> _GradientLevels:
    """Return what lives of gradients in a backward, sums included where a node is done."""
    flow = stage.gradients
    sums = GradientSums(flow).summands_and_parts()
    changes = defaultdict[int, list[LivenessChange]](list)
    for change in (*flow.flow_changes(), *flow.parameter_changes(has_gradients=has_gradients)):
        changes[change.place].append(change)
    rows: list[tuple[int, int, int]] = []
    live = 0
    # Backwards run from right to left. For n0 → n1, where n1 makes a gradient of 10 bytes, of which
    # n0 makes one of 4 and frees it:
    #
    #                  n0      n1
    #     before       10       0
    #     after         4      10
    #
    # As `highest` in peaks.py, but with the levels at every node instead of one peak.
    for place, node in reversed(list(zip(stage.nodes, stage.own_nodes, strict=True))):
        net = padding = 0
        for _, size, begins in changes[place]:
            counted = counting.size_of(size)
            net += counted if begins else -counted
            padding += counted - size if begins else 0
        needed = counting.needed(node.backward_peak_bytes, node.workspace_bytes) + padding
        after = live + net
        # Summands live beside their sum only until the node is done: the next one begins without.
        rows.append((live, live + needed, after + counting.size_of(sums.get(place, 0))))
        live = after
    before, peak, after_sums = zip(*reversed(rows), strict=True)
    return _GradientLevels(before, peak, after_sums)


def boundaries(stage: StageValues) -> tuple[int, ...]:
    """Return the positions between nodes at which a region may begin or end.

    None of them lies between nodes that are only recomputed together.
    """
    # Boundary i lies before node i. If nodes 2 and 4 are recomputed together only, boundaries 3 and
    # 4 would part them.
    position = {node.name: index for index, node in enumerate(stage.own_nodes)}
    inside: set[int] = set()
    for names in stage.graph.recomputed_together:
        members = [position[name] for name in names if name in position]
        if members:
            inside.update(range(min(members) + 1, max(members) + 1))
    return tuple(index for index in range(len(stage.nodes) + 1) if index not in inside)
