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

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.footprint import (
    SINGLE,
    Footprint,
    MessageStorage,
    ReceivedTensor,
    SharedParameter,
    WeightCopies,
)
from pipecompile.ir.graph import Parameter, Tensor
from pipecompile.memory_model.encodings import EncodedPlaces
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.memory_model.replicas import copied_bytes, part_of
from pipecompile.memory_model.stage_backward import StageBackward

__all__ = ["footprint_of"]


def footprint_of(
    ranges: LiveRanges,
    before: Iterable[str],
    nodes: Iterable[str],
    regions: Iterable[Iterable[str]] = (),
    encoded_runs: Iterable[tuple[Iterable[str], tuple[Encoding, ...]]] = (),
    weight_copies: WeightCopies = SINGLE,
) -> Footprint:
    """Return what the stage of `nodes` holds; nodes `before` it are in earlier stages.

    All other nodes are in later stages. `regions` are runs of its nodes that are recomputed, apart
    or one within another. `encoded_runs` are runs apart from these whose saved tensors are encoded,
    with the encodings. Neither is planned together with a split backward. Of its weights it holds
    `weight_copies`.
    """
    key = (
        tuple(before),
        tuple(nodes),
        tuple(map(tuple, regions)),
        tuple((tuple(names), encodings) for names, encodings in encoded_runs),
        weight_copies,
    )
    if key not in ranges.footprints:
        ranges.footprints[key] = _footprint(ranges, *key)
    return ranges.footprints[key]


def _footprint(
    ranges: LiveRanges,
    before: tuple[str, ...],
    nodes: tuple[str, ...],
    regions: tuple[tuple[str, ...], ...],
    encoded_runs: tuple[tuple[tuple[str, ...], tuple[Encoding, ...]], ...],
    weight_copies: WeightCopies,
) -> Footprint:
    # From here on nodes are places: of two nodes the one with the smaller place runs first.
    place = ranges.place
    stage = _StageMemory(
        ranges,
        {place[name] for name in before},
        sorted(place[name] for name in nodes),
        [sorted(place[name] for name in region) for region in regions],
        [
            EncodedPlaces(tuple(sorted(place[name] for name in names)), encodings)
            for names, encodings in encoded_runs
        ],
    )
    footprint = stage.footprint()
    older = stage.allocator.amount(stage.older_weights(weight_copies))
    return msgspec.structs.replace(footprint, parameters=footprint.parameters + older)


class _StageMemory(StageBackward):
    """One stage, followed through its actions. I and W are the halves of a split backward."""

    def footprint(self) -> Footprint:
        """Return everything about the stage."""
        amount, backward = self.allocator.amount, self._backward_changes
        weights, freeing = self._weight_backward_changes, self._changes_freeing_outputs
        # Backwards are priced without and with gradients: the first microbatch of a step leaves its
        # gradients, and each later one makes its own and adds it to them.
        state, workspace = self._optimizer(parameter for parameter, _ in self.trained_parameters)
        if self.ranges.shard and not self.ranges.gathers_in_actions:
            # A gather has all parameters twice, before there are gradients.
            workspace = max(workspace, sum(self._whole_sizes()) - sum(self._gradient_sizes()))
        return Footprint(
            parameters=amount(self._parameter_sizes()),
            gradients=amount(self._gradient_sizes()),
            optimizer=amount(state),
            optimizer_workspace=amount([workspace]),
            inputs=amount(node.input_bytes for node in self.own_nodes),
            activations=amount(self._activation_sizes()),
            freed_by_input_backward=amount(self._sizes_freed_by_input_backward),
            added_by_input_backward=(
                amount(self.gradients.bytes_between) if self.has_input_backward else ZERO
            ),
            forward_peak=self._forward_peak(),
            first_backward_peak=self._backward_peak(backward, has_gradients=False),
            backward_peak=self._backward_peak(backward, has_gradients=True),
            input_backward_peak=self._input_backward_peak() if self.has_input_backward else ZERO,
            # A weight backward is priced twice more: outputs that its microbatch still holds may be
            # freed by it too (see Snapshot.frees_outputs).
            first_weight_backward_peak=self._weight_backward_peak(weights, has_gradients=False),
            weight_backward_peak=self._weight_backward_peak(weights, has_gradients=True),
            first_weight_backward_peak_freeing_outputs=self._weight_backward_peak(
                freeing, has_gradients=False
            ),
            weight_backward_peak_freeing_outputs=self._weight_backward_peak(
                freeing, has_gradients=True
            ),
            buffer_copies=amount(self.buffer_copies(self.nodes)),
            kv_cache=amount(self.ranges.kv_tokens * node.kv_token_bytes for node in self.own_nodes),
            gradient_copies=amount(self._gradient_copies()),
            replica_sum_peak=amount([self._replica_sum_peak]),
            gathered=amount(self._whole_sizes()) if self.ranges.gathers_in_actions else ZERO,
            backward_sum_peak=amount([self._backward_sum_peak]),
            # Around a ring of replicas a rank receives from one and sends to one.
            replica_peers=min(2, self.ranges.replicas - 1) + self.ranges.more_peers,
            is_validated_later=self.ranges.post_validation,
            host=amount(self._host_sizes()) if self.ranges.optimizer_on_host else ZERO,
            received=tuple(self._received()),
            received_gradients=tuple(self._received_gradients()),
            sent_outputs=tuple(self._sent_outputs()),
            sent_by_backward=tuple(self._sent_gradients(is_input_backward=False)),
            sent_by_input_backward=tuple(self._sent_gradients(is_input_backward=True)),
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
        if not self.ranges.gathers_in_actions:
            yield from self._whole_sizes()
        if self.ranges.shard:
            for name in self.parameter_readers:
                yield self._part(self.graph.parameter_by_name[name]).bytes
            yield from map(self._share, self._unnamed_parameters)

    def _whole_sizes(self) -> Iterator[int]:
        for name in self.parameter_readers:
            yield self.graph.parameter_by_name[name].bytes
        yield from self._unnamed_parameters

    def older_weights(self, copies: WeightCopies) -> Iterator[int]:
        """Yield the sizes of older versions of trained parameters."""
        for parameter, _ in self.trained_parameters:
            is_of_earlier = bool(self.ranges.parameter_readers[parameter.name] & self.before)
            count = copies.of_earlier_stages if is_of_earlier else copies.own
            yield from [parameter.bytes] * (count - 1)
        yield from self._unnamed_parameters * (copies.own - 1)

    def _part(self, parameter: Parameter) -> Parameter:
        """Return what of a parameter stays on this rank between steps."""
        return part_of(parameter, self.ranges.replicas) if self.ranges.shard else parameter

    def _share(self, size: int) -> int:
        """Return what a replica has of `size` bytes that are divided, rounded up."""
        return -(-size // self.ranges.replicas)

    def _gradient_sizes(self) -> Iterator[int]:
        """Yield what a backward leaves of gradients, by parameter."""
        if not self.ranges.divides_gradients:
            yield from self._whole_gradient_sizes()
            return
        for parameter, _ in self.trained_parameters:
            yield self._part(parameter).bytes
        yield from map(self._share, self._unnamed_parameters)

    def _whole_gradient_sizes(self) -> Iterator[int]:
        for parameter, _ in self.trained_parameters:
            yield parameter.bytes
        # Without a name nobody can say that a parameter is frozen: it counts as trained.
        yield from self._unnamed_parameters

    @property
    def _replica_sum_peak(self) -> int:
        """The bytes that the sum at a step's end takes beyond those of the whole parameters, which
        are freed first.
        """
        if not self.ranges.shard or self.ranges.divides_gradients:
            return 0
        taken = self._summing_bytes - sum(self._whole_gradient_sizes())
        return max(0, taken - sum(self._whole_sizes()))

    @property
    def _backward_sum_peak(self) -> int:
        """The bytes that the sum in a backward takes, with the whole gradients that it has made.

        Parameters that are gathered for each action are freed before it.
        """
        if not self.ranges.divides_gradients:
            return 0
        freed = sum(self._whole_sizes()) if self.ranges.gathers_in_actions else 0
        gradients = sum(self._whole_gradient_sizes())
        # They are copied into the message one after the other, and freed together.
        return max(gradients, max(2 * gradients, self._summing_bytes) - freed)

    @property
    def _summing_bytes(self) -> int:
        """The bytes that live while gradients are summed: a message with all of them, and the part
        of this rank that comes back. gloo works on a second copy.
        """
        gradients = sum(self._whole_gradient_sizes())
        copies = 2 if self.graph.allocator == "cpu" else 1
        return copies * gradients + self._share(gradients)

    def _gradient_copies(self) -> Iterator[int]:
        """Yield the copies in which small gradients are summed over replicas; those of parameters
        that other stages read too are summed later.
        """
        if self.ranges.replicas == 1 or self.ranges.shard:
            return
        tied = {parameter.name for parameter in self._tied_parameters()}
        trained = [parameter for parameter, _ in self.trained_parameters]
        own = [parameter.bytes for parameter in trained if parameter.name not in tied]
        yield from copied_bytes([*own, *self._unnamed_parameters])
        if not self.ranges.ties_once:
            yield from copied_bytes([p.bytes for p in trained if p.name in tied])

    def _optimizer(self, trained: Iterable[Parameter]) -> tuple[Sequence[int], int]:
        """Return the storages of state for these parameters on the device, and the workspace of a
        step.
        """
        if self.ranges.optimizer_on_host:
            return (), 0
        return self._stepped(trained)

    def _host_sizes(self) -> Iterator[int]:
        """Yield what an optimizer on the host holds: its state, and copies of parameters and
        gradients.
        """
        for parameter, _ in self.trained_parameters:
            state, _ = self._stepped([parameter])
            # SGD keeps only the float32 copy that stands for one in the parameter's type.
            master, _ = optimizer_bytes(
                [parameter], "sgd", master_weights=self.ranges.master_weights, lists=False
            )
            yield from (*state, *(master or [parameter.bytes] * 2))

    def _stepped(self, trained: Iterable[Parameter]) -> tuple[Sequence[int], int]:
        return optimizer_bytes(
            map(self._part, trained),
            self.ranges.optimizer,
            master_weights=self.ranges.master_weights,
            lists=self.allocator.steps_over_lists,
        )

    def _shared_parameters(self) -> Iterator[SharedParameter]:
        """Yield the parameters that nodes of other stages read too."""
        # For a head of stage 3 that is tied to the embedding of stage 0, both list its 400 MB. If
        # the two stages lie on one rank, the rank counts them once (rank.py).
        amount = self.allocator.amount
        for parameter in self._tied_parameters():
            trained = [parameter] if parameter.trainable else []
            whole = [] if self.ranges.gathers_in_actions else [parameter.bytes]
            parts = [self._part(parameter).bytes] if self.ranges.shard else []
            left = map(self._part, trained) if self.ranges.divides_gradients else trained
            yield SharedParameter(
                name=parameter.name,
                parameters=amount([*whole, *parts]),
                gradients=amount(each.bytes for each in left),
                optimizer=amount(self._optimizer(trained)[0]),
            )

    def _tied_parameters(self) -> Iterator[Parameter]:
        for name in self.parameter_readers:
            if not self.ranges.parameter_readers[name] <= self.inside:
                yield self.graph.parameter_by_name[name]

    # -- messages

    def _received(self) -> Iterator[ReceivedTensor]:
        """Yield what comes from the stage before."""
        needed = {*self._inputs_for_weight_backward()}
        for tensor, _ in self.arriving:
            yield ReceivedTensor(
                name=tensor.producer,
                size=self.allocator.amount([tensor.bytes]),
                is_needed_by_weight_backward=tensor.producer in needed,
                relayed_as=tuple(self.relayed_as(tensor)),
            )

    def _received_gradients(self) -> Iterator[ReceivedTensor]:
        """Yield the gradients that come from the stage behind."""
        needed = {*self.gradients.gradients_for_weight_backward}
        for tensor in self.leaving:
            if tensor.gradient_bytes:
                yield ReceivedTensor(
                    name=tensor.producer,
                    size=self._received_gradient(tensor),
                    is_needed_by_weight_backward=tensor.producer in needed,
                    relayed_as=tuple(self.gradients.relayed_gradients.get(tensor.producer, ())),
                )

    def _sent_outputs(self) -> Iterator[MessageStorage]:
        """Yield what is sent to later stages; a whole backward counts as the weight backward."""
        # Views that are sent lie in one storage: it takes memory once, under all their names.
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
        for tensor in self.gradients.missing:
            yield MessageStorage(
                names=(tensor.producer,),
                size=self._only_in_first_step(tensor),
                is_needed_by_weight_backward=False,
            )

    def _received_gradient(self, tensor: Tensor) -> Amount:
        places = (self.ranges.place[name] for name in tensor.consumers_with_gradient)
        if any(map(self.is_later, places)):
            return self.allocator.amount([tensor.gradient_bytes])
        return self._only_in_first_step(tensor)

    def _only_in_first_step(self, tensor: Tensor) -> Amount:
        """Return the bytes of a gradient that no later stage makes: none are expected.

        It is received in the first step only, as zeros, so that the bound has them.
        """
        return Amount(expected=0, bound=self.allocator.amount([tensor.gradient_bytes]).bound)

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
