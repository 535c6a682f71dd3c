"""What one stage holds: its nodes followed through a forward, a backward, and both halves of one.

    forward     A storage lives from the node that makes it to its last reader. What a backward
                saves and what later stages read lives on: these are the stage's activations.
    backward    Nodes run from the last to the first. A saved storage is freed with the first node
                that saved it, outputs at the end. Gradients live as in gradients.py.

So a chain of three nodes, each of which saves its input, holds (t: values, g: gradients, t2 is read
by nobody):

                n0        n1        n2        n2'       n1'       n0'
    forward     t0        t0 t1     t0 t1 t2
    backward                                  t0 t1 g1  t0 g1 g0  g0

The peak is the largest of these sums, with what each node's kernels take in addition.

A recomputed region keeps only what it reads. When the backward comes to its last saver, its forward
runs once more, up to the last tensor that it saves. Regions within it are recomputed in turn.

An encoded run (encodings.py) keeps its saved tensors in another form. They exist again, in full,
from the backward of the last saver to that of the first. What a run reads lives until it is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.encodings import Policy
from pipecompile.ir.footprint import Footprint, MessageStorage, SharedParameter
from pipecompile.ir.graph import Parameter
from pipecompile.memory_model.encodings import EncodedPlaces, StorageEncoding
from pipecompile.memory_model.gradient_sums import GradientSums
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.memory_model.peaks import NO_WORK, WorkBeforeNode, highest
from pipecompile.memory_model.stage_values import (
    BOUND_SCRATCH,
    Counting,
    StageValues,
    StoredValue,
)
from pipecompile.memory_model.subgraph import LivenessChange

__all__ = ["footprint_of"]

NO_SUMS: Mapping[int, int] = {}


def footprint_of(
    ranges: LiveRanges,
    before: Iterable[str],
    nodes: Iterable[str],
    regions: Iterable[Iterable[str]] = (),
    encoded_runs: Iterable[tuple[Iterable[str], tuple[Policy, ...]]] = (),
) -> Footprint:
    """Return what the stage of `nodes` holds; nodes `before` it are in earlier stages.

    All other nodes are in later stages. `regions` are runs of its nodes that are recomputed, apart
    or one within another. `encoded_runs` are runs apart from these whose saved tensors are encoded,
    with the policies. Neither is planned together with a split backward.
    """
    place = ranges.place
    stage = _StageMemory(
        ranges,
        {place[name] for name in before},
        sorted(place[name] for name in nodes),
        [sorted(place[name] for name in region) for region in regions],
        [
            EncodedPlaces(tuple(sorted(place[name] for name in names)), policies)
            for names, policies in encoded_runs
        ],
    )
    return stage.footprint()


class _StageMemory(StageValues):
    """One stage, followed through its actions. I and W are the halves of a split backward."""

    def footprint(self) -> Footprint:
        """Return everything about the stage."""
        amount, backward = self.allocator.amount, self._backward_changes
        weights, freeing = self._weight_backward_changes, self._changes_freeing_outputs
        state, scratch = self._optimizer([parameter for parameter, _ in self.trained_parameters])
        return Footprint(
            parameters=amount(self._parameter_sizes()),
            gradients=amount(self._gradient_sizes()),
            optimizer=amount(state),
            optimizer_scratch=amount([scratch]),
            inputs=amount(node.input_bytes for node in self.own_nodes),
            received=amount(tensor.bytes for tensor, _ in self.arriving),
            received_gradients=amount(tensor.gradient_bytes for tensor in self.leaving),
            activations=amount(self._activation_sizes()),
            freed_by_input_backward=amount(self._sizes_freed_by_input_backward),
            added_by_input_backward=(
                amount(self.gradients.bytes_between) if self.has_input_backward else ZERO
            ),
            forward_peak=self._forward_peak(),
            first_backward_peak=self._backward_peak(backward, has_gradients=False),
            backward_peak=self._backward_peak(backward, has_gradients=True),
            input_backward_peak=self._input_backward_peak() if self.has_input_backward else ZERO,
            first_weight_backward_peak=self._weight_backward_peak(weights, has_gradients=False),
            weight_backward_peak=self._weight_backward_peak(weights, has_gradients=True),
            first_weight_backward_peak_freeing_outputs=self._weight_backward_peak(
                freeing, has_gradients=False
            ),
            weight_backward_peak_freeing_outputs=self._weight_backward_peak(
                freeing, has_gradients=True
            ),
            buffer_copies=amount(self.buffer_copies(self.nodes)),
            sent_outputs=tuple(self._sent_outputs()),
            sent_by_backward=tuple(self._sent_gradients(is_input_backward=False)),
            sent_by_input_backward=tuple(self._sent_gradients(is_input_backward=True)),
            relayed_inputs=tuple(self.relayed_inputs),
            inputs_for_weight_backward=tuple(self._inputs_for_weight_backward()),
            relayed_gradients=tuple(self.gradients.relayed_gradients),
            gradients_for_weight_backward=tuple(self.gradients.gradients_for_weight_backward),
            shared=tuple(self._shared_parameters()),
        )

    # -- parameters

    @cached_property
    def _unnamed_parameters(self) -> list[int]:
        """The bytes of parameters that a cost graph gives by node, without names."""
        return [
            node.parameter_bytes
            for node in self.own_nodes
            if not node.parameters and node.parameter_bytes
        ]

    def _parameter_sizes(self) -> Iterator[int]:
        for name in self.parameter_readers:
            yield self.graph.parameter_by_name[name].bytes
        yield from self._unnamed_parameters

    def _gradient_sizes(self) -> Iterator[int]:
        for parameter, _ in self.trained_parameters:
            yield parameter.bytes
        yield from self._unnamed_parameters

    def _optimizer(self, trained: Sequence[Parameter]) -> tuple[Sequence[int], int]:
        """Return the storages of state for these parameters, and the scratch of a step."""
        return optimizer_bytes(
            trained,
            self.ranges.optimizer,
            master_weights=self.ranges.master_weights,
            lists=self.allocator.steps_over_lists,
        )

    def _shared_parameters(self) -> Iterator[SharedParameter]:
        """Yield the parameters that nodes of other stages read too."""
        amount = self.allocator.amount
        for name in self.parameter_readers:
            if not self.ranges.parameter_readers[name] <= self.inside:
                parameter = self.graph.parameter_by_name[name]
                trained = [parameter] if parameter.trainable else []
                yield SharedParameter(
                    name=name,
                    parameters=amount([parameter.bytes]),
                    gradients=amount(each.bytes for each in trained),
                    optimizer=amount(self._optimizer(trained)[0]),
                )

    # -- forward

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
        # Twice the same walk: once with bytes as they are asked for, once as a bound counts them.
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
                scratch = counting.size_of(encoding.cost.scratch_bytes)
                work[encoding.encoded_at].append(WorkBeforeNode(0, kept, scratch))
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
        """Whether it is freed when copies of its views were made for later stages."""
        return not value.holders and self.is_sent_as_copy(value.storage)

    def _peak_while_encoding(self, run: EncodedPlaces, counting: Counting) -> int:
        """Return the most that lives while a run's encodings are made, above what they take.

        They are made one after the other. A storage is freed with its last encoding, unless the run
        did not make it. Two storages of 8 bytes, each encoded in 1 byte with 2 bytes of scratch:

            before               16         9
            encoding made        17        10
            with scratch         19        12
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
            peak = max(peak, live + counting.size_of(encoding.cost.scratch_bytes))
            encodings_left[id(value)] -= 1
            if not encodings_left[id(value)] and id(value) in own:
                live -= counting.size_of(value.storage.bytes)
        kept = sum(counting.size_of(self._kept_bytes(encoding)) for _, encoding in waiting)
        return peak - kept

    # -- backward

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
        """Whether W does not lead through any node that saved it."""
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
        """The same where outputs are freed as other activations are."""
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

    # -- messages

    def _sent_outputs(self) -> Iterator[MessageStorage]:
        """Yield what is sent to later stages; a whole backward counts as the weight backward."""
        amount = self.allocator.amount
        for value in self.all_stored:
            names = self.sent_names(value.storage)
            if names:
                yield MessageStorage(
                    names=names,
                    size=amount([value.storage.bytes]),
                    is_needed_by_weight_backward=not self._weight_backward_reach.isdisjoint(
                        value.holders
                    ),
                )
        for tensor in self.sent_copies:
            yield MessageStorage(
                names=(tensor.producer,),
                size=amount([tensor.bytes]),
                is_needed_by_weight_backward=False,
            )

    def _sent_gradients(self, *, is_input_backward: bool) -> Iterator[MessageStorage]:
        """Yield the gradients of inputs that take memory as they are returned."""
        returned = self.gradients.returned(is_input_backward=is_input_backward)
        for names, size, is_held in returned:
            yield MessageStorage(
                names=names,
                size=self.allocator.amount([size]),
                is_needed_by_weight_backward=is_held,
            )

    def _inputs_for_weight_backward(self) -> Iterator[str]:
        """Yield the inputs that W needs: saved ones, and those that autograd's nodes lead to."""
        reach = self._weight_backward_reach
        for tensor, _ in self.arriving:
            is_saved = (
                tensor.storage is not None
                and not tensor.strided_copy_bytes
                and any(tensor.storage in self.graph.nodes[place].saved for place in reach)
            )
            if is_saved or not reach.isdisjoint(self.gradient_givers(tensor)):
                yield tensor.producer

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
    def _countings(self) -> tuple[Counting, Counting]:
        """How bytes are counted as expected, and for a bound."""
        return Counting(1, int), Counting(BOUND_SCRATCH, self.allocator.rounded)

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
            scratch = counting.size_of(encoding.cost.scratch_bytes)
            work[encoding.decoded_at].append(WorkBeforeNode(full + scratch, full))
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
