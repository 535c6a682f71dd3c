"""A stage followed through its forward: what it keeps, and the most that lives meanwhile.

Part of stage.py, which explains the rules and draws an example.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from pipecompile.ir.amount import Amount
from pipecompile.memory_model.encodings import EncodedPlaces, StorageEncoding
from pipecompile.memory_model.peaks import WorkBeforeNode, highest
from pipecompile.memory_model.stage_values import (
    BOUND_WORKSPACE,
    Counting,
    StageValues,
    StoredValue,
)
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["StageForward"]


class StageForward(StageValues):
    """One stage in its forward."""

    @cached_property
    def _countings(self) -> tuple[Counting, Counting]:
        """How bytes are counted as expected, and for a bound."""
        return Counting(1, int), Counting(BOUND_WORKSPACE, self.allocator.rounded)

    def _activation_sizes(self) -> Iterator[int]:
        """Yield the sizes of what a microbatch keeps from its forward to its backward."""
        for value in self.all_stored:
            if self.is_kept(value):
                yield value.storage.bytes
        yield from (tensor.bytes for tensor in self.sent_copies)
        yield from map(self._kept_bytes, self._encodings)
        yield from (size for _, size in self._buffer_copies_of_regions(is_recomputed=True))

    def _forward_peak(self) -> Amount:
        changes = list(self._forward_changes())
        rises = [node.forward_peak_bytes for node in self.own_nodes]
        # The forward is walked through twice: once it counts the bytes that are asked for, and once
        # the most that an allocator may take for them.
        peaks = []
        for counting in self._countings:
            at_end = self._peaks_at_end_of_runs(counting)
            work = self._work_before_forwards(counting)
            graph_nodes = self.graph.nodes
            peaks.append(highest(graph_nodes, self.nodes, changes, rises, counting, at_end, work))
        return Amount(expected=peaks[0], bound=peaks[1])

    def _forward_changes(self) -> Iterator[LivenessChange]:
        for value in self.all_stored:
            yield LivenessChange(value.place, value.storage.bytes, begins=True)
            if not self.is_kept(value):
                yield LivenessChange(value.last_forward_use, value.storage.bytes, begins=False)
        for encoding in self._encodings:
            if encoding.waits_for_end:
                size = self._kept_bytes(encoding)
                yield LivenessChange(encoding.encoded_at, size, begins=True)
        # A region that is never recomputed frees its copies when its forward ends.
        for region, size in self._buffer_copies_of_regions(is_recomputed=False):
            yield LivenessChange(region[-1], size, begins=False)

    def _buffer_copies_of_regions(
        self, *, is_recomputed: bool
    ) -> Iterator[tuple[Sequence[int], int]]:
        """Yield each buffer copy with its region: one that is recomputed, or one that is not."""
        for index, region in enumerate(self.regions):
            if (self.recomputed_at(index) is not None) == is_recomputed:
                for size in self.buffer_copies(region):
                    yield region, size

    @cached_property
    def _encodings(self) -> list[StorageEncoding]:
        return [encoding for value in self.stored for encoding in value.encodings]

    def _kept_bytes(self, encoding: StorageEncoding) -> int:
        return encoding.kept_bytes(self.graph.allocator)

    def _work_before_forwards(self, counting: Counting) -> dict[int, list[WorkBeforeNode]]:
        """Return by node what is done as its forward begins.

        Inputs are laid out with gaps before the first node, and regions copy buffers before their
        first node. Encodings that do not wait for the end of their run are made beside the saver's
        kernels.
        """
        work: dict[int, list[WorkBeforeNode]] = defaultdict(list)
        for value in self.strided_copies:
            size = counting.size_of(value.storage.bytes)
            work[self.nodes[0]].append(WorkBeforeNode(size, size))
        for region in self.regions:
            copies = sum(map(counting.size_of, self.buffer_copies(region)))
            work[region[0]].append(WorkBeforeNode(copies, copies))
        for encoding in self._encodings:
            if not encoding.waits_for_end:
                kept = counting.size_of(self._kept_bytes(encoding))
                workspace = counting.size_of(encoding.cost.workspace_bytes)
                work[encoding.encoded_at].append(WorkBeforeNode(0, kept, workspace))
        return work

    def _peaks_at_end_of_runs(self, counting: Counting) -> dict[int, int]:
        """Return by the last node of a run the most that lives while its encodings are made.

        It is above what lives when all of them are made. At the stage's last node it includes the
        copies that are sent, and the storages that are freed once these are made.
        """
        peaks = {
            run.places[-1]: self._peak_while_encoding(run, counting)
            for run in set(self.run_at.values())
            if run.encodes_at_end
        }
        last = self.nodes[-1]
        copied_from = sum(
            counting.size_of(value.storage.bytes)
            for value in self.all_stored
            if self._is_freed_after_copies(value)
        )
        copies = sum(counting.size_of(tensor.bytes) for tensor in self.sent_copies)
        # The copies for later stages are made when the last run has encoded what it saves.
        return peaks | {last: copied_from + max(copies, peaks.get(last, 0))}

    def _is_freed_after_copies(self, value: StoredValue) -> bool:
        """Return whether it is freed when copies of its views were made for later stages."""
        return not value.holders and self.is_sent_as_copy(value.storage)

    def _peak_while_encoding(self, run: EncodedPlaces, counting: Counting) -> int:
        """Return the most that lives while a run's encodings are made, above what they take.

        They are made one after the other. A storage is freed with its last encoding, unless the run
        did not make it. Two storages of 8 bytes, each encoded in 1 byte with 2 bytes of workspace:

            before               16         9
            encoding made        17        10
            with workspace         19        12
            storage freed         9         2      19 at most, less the 2 of the encodings: 17
        """
        end = run.places[-1]
        waiting = [
            (value, encoding)
            for value in self.stored
            for encoding in value.encodings
            if encoding.waits_for_end and encoding.encoded_at == end
        ]
        # Encoding follows the order in which the run's nodes saved the storages.
        waiting.sort(key=lambda pair: min(p for p in pair[1].savers if p in run.places))
        encodings_left = Counter(id(value) for value, _ in waiting)
        ending = [
            value
            for value in self.all_stored
            if value.last_forward_use == end
            and not self.is_kept(value)
            and not self._is_freed_after_copies(value)
        ]
        # What the run read from outside is freed at its end; what it made, with its last encoding.
        read = {id(value) for value in ending if self.run_at.get(value.place) is not run}
        own = {id(value) for value in ending if id(value) in encodings_left} - read
        live = peak = sum(
            counting.size_of(value.storage.bytes) for value in ending if id(value) in own | read
        )
        for value, encoding in waiting:
            live += counting.size_of(self._kept_bytes(encoding))
            peak = max(peak, live + counting.size_of(encoding.cost.workspace_bytes))
            encodings_left[id(value)] -= 1
            if not encodings_left[id(value)] and id(value) in own:
                live -= counting.size_of(value.storage.bytes)
        kept = sum(counting.size_of(self._kept_bytes(encoding)) for _, encoding in waiting)
        return peak - kept
