"""A stage followed through its backward, and through both halves of a split one.

Part of stage.py, which explains the rules and draws an example. I and W are the input backward and
the weight backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from pipecompile.ir.amount import Amount
from pipecompile.memory_model.gradient_sums import GradientSums
from pipecompile.memory_model.peaks import NO_WORK, WorkBeforeNode, highest
from pipecompile.memory_model.stage_forward import StageForward
from pipecompile.memory_model.stage_values import (
    Counting,
    StoredValue,
)
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["StageBackward"]

NO_SUMS: Mapping[int, int] = {}


class StageBackward(StageForward):
    """One stage in its backward: nodes run from the last to the first."""

    # -- the whole backward

    @cached_property
    def _backward_changes(self) -> list[LivenessChange]:
        """What a whole backward makes and frees, without gradients of parameters."""
        return [
            *self._freed_changes(),
            *self.gradients.flow_changes(),
            *self._freed_region_copies(before_backward=False),
        ]

    def _backward_peak(self, changes: Sequence[LivenessChange], *, has_gradients: bool) -> Amount:
        made = self.gradients.parameter_changes(has_gradients=has_gradients)
        rises = [node.backward_peak_bytes for node in self.own_nodes]
        return self._peak([*changes, *made], rises, self._sums_of_backward, recomputes=True)

    @cached_property
    def _gradient_sums(self) -> GradientSums:
        return GradientSums(self.gradients)

    @cached_property
    def _sums_of_backward(self) -> Mapping[int, int]:
        return self._gradient_sums.summands_and_parts()

    def _freed_changes(self, *, is_weight_backward: bool = False) -> Iterator[LivenessChange]:
        """Yield what a backward, or W, frees of the activations; outputs stay until it ends."""
        # Backwards run from the last node to the first, so `holders[0]` is the last that needs it.
        for value in self.all_stored:
            is_gone = is_weight_backward and self._is_freed_by_input_backward(value)
            if value.holders and not self.is_sent(value.storage) and not is_gone:
                yield LivenessChange(value.holders[0], value.storage.bytes, begins=False)
        for encoding in self._encodings:
            first_saver = encoding.savers[0]
            yield LivenessChange(first_saver, self._kept_bytes(encoding), begins=False)
            if not is_weight_backward:  # the decoded storage
                yield LivenessChange(first_saver, encoding.storage_bytes, begins=False)
        for region, size in self._buffer_copies_of_regions(is_recomputed=True):
            yield LivenessChange(region[0], size, begins=False)

    def _freed_region_copies(self, *, before_backward: bool) -> Iterator[LivenessChange]:
        """Yield where recomputed storages are freed, before or after the backward of that node."""
        for value in self.stored:
            for copy in value.region_copies:
                if copy.ends_before_backward == before_backward:
                    yield LivenessChange(copy.place, value.storage.bytes, begins=False)

    # -- the halves of a split backward

    def _is_freed_by_input_backward(self, value: StoredValue) -> bool:
        """Return whether W does not lead through any node that saved it."""
        # Outputs wait for the step's end as messages, whoever saved them.
        if not self.has_input_backward or not value.holders or self.is_sent(value.storage):
            return False
        return self.split_backward.weight_backward_reach.isdisjoint(value.holders)

    @property
    def _sizes_freed_by_input_backward(self) -> list[int]:
        return [
            value.storage.bytes
            for value in self.all_stored
            if self._is_freed_by_input_backward(value)
        ]

    @property
    def _weight_backward_reach(self) -> set[int]:
        """What W leads through: all nodes, if there is no I."""
        if not self.has_input_backward:
            return self.inside
        return self.split_backward.weight_backward_reach

    def _input_backward_peak(self) -> Amount:
        gradients = (
            LivenessChange(places[-1], parameter.bytes, begins=True)
            for parameter, places in self.gradients.input_backward_parameters
        )
        sums = self._gradient_sums.summands_and_parts(
            is_input_backward=True, freed_bytes=sum(self._sizes_freed_by_input_backward)
        )
        return self._peak(
            [*self.gradients.flow_changes(is_input_backward=True), *gradients],
            list(self.gradients.input_backward_rises()),
            sums,
        )

    @cached_property
    def _weight_backward_changes(self) -> list[LivenessChange]:
        """What W makes and frees, without gradients of parameters: all of it, if there is no I."""
        if not self.has_input_backward:
            return self._backward_changes
        freed = self._freed_changes(is_weight_backward=True)
        return [*freed, *self.gradients.weight_backward_changes()]

    @cached_property
    def _changes_freeing_outputs(self) -> list[LivenessChange]:
        """What W makes and frees where it frees outputs as it does other activations."""
        return [*self._weight_backward_changes, *self._freed_outputs()]

    def _weight_backward_peak(
        self, changes: Sequence[LivenessChange], *, has_gradients: bool
    ) -> Amount:
        made = self.gradients.parameter_changes(
            has_gradients=has_gradients, is_weight_backward=True
        )
        if self.has_input_backward:
            rises = list(self.gradients.weight_backward_rises())
            sums: Mapping[int, int] = self._gradient_sums.weight_backward_summands()
        else:
            rises = [node.backward_peak_bytes for node in self.own_nodes]
            sums = self._sums_of_backward
        return self._peak([*changes, *made], rises, sums)

    def _freed_outputs(self) -> Iterator[LivenessChange]:
        for value in self.all_stored:
            is_needed = not self._weight_backward_reach.isdisjoint(value.holders)
            if is_needed and self.is_sent(value.storage):
                yield LivenessChange(value.holders[0], value.storage.bytes, begins=False)

    # -- peaks

    def _peak(
        self,
        changes: Sequence[LivenessChange],
        rises: Sequence[int],
        sums: Mapping[int, int] = NO_SUMS,
        *,
        recomputes: bool = False,
    ) -> Amount:
        """Return the most that lives in a backward, above what lived before.

        `rises` are in the order of the nodes, `sums` by node. A backward that `recomputes` also
        decodes what was encoded.
        """
        nodes, rises = self.nodes[::-1], rises[::-1]
        peaks = []
        for counting, work in zip(self._countings, self._work_before_backwards, strict=True):
            at_end = {place: counting.size_of(size) for place, size in sums.items()}
            work = work if recomputes else NO_WORK
            peaks.append(highest(self.graph.nodes, nodes, changes, rises, counting, at_end, work))
        return Amount(expected=peaks[0], bound=peaks[1])

    @cached_property
    def _work_before_backwards(self) -> list[Mapping[int, Sequence[WorkBeforeNode]]]:
        return [self._work_before_backward(counting) for counting in self._countings]

    def _work_before_backward(self, counting: Counting) -> dict[int, list[WorkBeforeNode]]:
        """Return by node what is done as its backward begins, in this order.

        Regions are recomputed, from the outermost on. What these freed again is gone. Then encoded
        storages are decoded, one after the other.
        """
        # A region within another can only be recomputed from what the outer recompute holds for it.
        work: dict[int, list[WorkBeforeNode]] = defaultdict(list)
        for region in sorted(range(len(self.regions)), key=lambda index: -len(self.regions[index])):
            place = self.recomputed_at(region)
            if place is not None:
                work[place].append(self._recompute(region, counting))
        for place, size, _ in self._freed_region_copies(before_backward=True):
            work[place].append(WorkBeforeNode(0, -counting.size_of(size)))
        for encoding in self._encodings:
            full = counting.size_of(encoding.storage_bytes)
            workspace = counting.size_of(encoding.cost.workspace_bytes)
            work[encoding.decoded_at].append(WorkBeforeNode(full + workspace, full))
        return work

    def _recompute(self, region: int, counting: Counting) -> WorkBeforeNode:
        """Return the recompute of a region: the forward of the nodes that it runs once more."""
        nodes, members = self.recomputed_nodes(region), set(self.regions[region])
        recomputed = set(nodes)
        changes: list[LivenessChange] = []
        held_bytes = 0
        for value in self.stored:
            if value.place not in recomputed:
                continue
            size = value.storage.bytes
            changes.append(LivenessChange(value.place, size, begins=True))
            if any(copy.region == region for copy in value.region_copies):
                held_bytes += counting.size_of(size)
            elif members.issuperset(value.storage.readers):
                # What others read is returned by the region, and lives to its end.
                last = self.last_read(value.place, value.storage)
                changes.append(LivenessChange(last, size, begins=False))
        rises = [self.graph.nodes[place].forward_peak_bytes for place in nodes]
        peak = highest(self.graph.nodes, nodes, changes, rises, counting)
        return WorkBeforeNode(peak, held_bytes)
