"""The gradients that flow through a stage: where each begins and ends to live.

Backwards run from the stage's last node to its first. A gradient lives from the node whose backward
makes it to the one whose backward reads it last, or to the stage's end if it is returned to an
earlier stage. A stage of four nodes, with a weight at node 1 and a skip from 0 to 3:

    place          3        2        1        0
    from behind    g₃ (lies in a receive buffer)
    backward       makes g₂, and g₀ for the skip
                   ├─ g₂ ───┤
                            ├─ g₁ ───┤
                                     ├─ weight gradient ─────▶  held to the step's end
                   ├─ g₀ of the skip ──┼─ sum with g₀ of 1 ───▶  returned to the stage before

A split backward (split_backward.py) makes g₁ in its input backward, and holds it for the weight
gradient that its weight backward makes.

gradient_sums.py says what lives while gradients are summed, and stage.py turns the changes that are
yielded here into peaks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from pipecompile.ir.graph import GradientStorage, Parameter, Tensor
from pipecompile.memory_model.subgraph import LivenessChange, StageSubgraph

__all__ = ["GradientFlow"]

ONE_KERNEL_BACKWARDS = frozenset({"torch.nn.LSTM"})
"""Operators with one backward kernel, which makes all gradients in either half of a backward."""


class GradientFlow:
    """The gradients of one stage, for a whole backward and for both halves of a split one.

    Methods take `is_input_backward` or `is_weight_backward` where a half differs from the whole.
    """

    def __init__(self, stage: StageSubgraph) -> None:
        self.stage = stage
        self.ranges, self.graph = stage.ranges, stage.graph
        self.nodes, self.inside = stage.nodes, stage.inside
        self.place = stage.ranges.place

    # -- what a split backward holds between its halves

    @cached_property
    def held_between(self) -> list[tuple[GradientStorage, int]]:
        """The gradients that I holds for W, each with the node at which W frees it.

        Those that are returned lie in the message, and are not counted here.
        """
        returned = {id(storage) for storage in self.return_storages(is_input_backward=True)}
        held = []
        for gradient, places in self.captured:
            if id(gradient) not in returned:
                # W walks from each place where it begins; the gradient is freed with the last.
                last = min(map(self.stage.split_backward.last_run_from, places))
                held.append((gradient, last))
        return held

    @cached_property
    def captured(self) -> list[tuple[GradientStorage, set[int]]]:
        """The gradients of the stage with which W begins, and where."""
        pairs = (
            (gradient, self.stage.split_backward.capture_places(gradient)) for gradient in self.own
        )
        return [(gradient, places) for gradient, places in pairs if places]

    @property
    def gradients_for_weight_backward(self) -> Iterator[str]:
        """The outputs whose received gradients I holds for W: all if W begins at the outputs."""
        if not self.stage.has_input_backward or self.stage.split_backward.begins_at_outputs:
            yield from (tensor.producer for tensor in self.stage.leaving)
        else:
            names = (name for held in self._held_as_received() for name in self._outputs_of(held))
            yield from dict.fromkeys(names)

    def _held_as_received(self) -> Iterator[GradientStorage]:
        """Yield the gradients that were made in later stages and that W begins with."""
        gradients = {
            id(gradient): gradient
            for place in self.nodes
            for gradient in self.ranges.capturable.get(place, ())
        }
        for key, gradient in gradients.items():
            if key not in self.own_ids and self.stage.split_backward.capture_places(gradient):
                yield gradient

    def _outputs_of(self, received: GradientStorage) -> list[str]:
        """Return the outputs whose gradient this may be; all of them if that cannot be told."""
        outputs = {tensor.producer: self.place[tensor.producer] for tensor in self.stage.leaving}
        captures = {self.place[name] for name in received.captured_at}
        matching = [
            name
            for name, place in outputs.items()
            if not captures.isdisjoint({place, *self.ranges.places_sharing(received, place)})
        ]
        return matching or list(outputs)

    @property
    def input_backward_parameters(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters whose gradients I makes, and holds, with the nodes that read them."""
        names = self._input_backward_names
        return [pair for pair in self.stage.trained_parameters if pair[0].name in names]

    @property
    def _input_backward_names(self) -> frozenset[str]:
        if not self.stage.has_input_backward:
            return frozenset()
        return self.stage.split_backward.input_backward_parameters

    @property
    def bytes_between(self) -> Iterator[int]:
        """The sizes of the gradients that live between I and W."""
        yield from (gradient.bytes for gradient, _ in self.held_between)
        yield from (parameter.bytes for parameter, _ in self.input_backward_parameters)

    # -- what is returned to earlier stages

    def return_storages(self, *, is_input_backward: bool) -> Sequence[GradientStorage | None]:
        """Return by input the stage's gradient storage that is returned; None where it is a copy.

        Autograd hands out a storage of its own only if nobody else holds it. A whole backward
        therefore copies what others hold too, except where the input has its gradient through a
        view; an input backward, which collects the gradients itself, does not.
        """
        return self._sole_storages if is_input_backward else self._taken_storages

    @cached_property
    def _taken_storages(self) -> Sequence[GradientStorage | None]:
        views = self.ranges.sole_view
        pairs = zip(self.stage.inputs_with_gradient, self._sole_storages, strict=True)
        return [
            storage if tensor.is_permuted or self.place[tensor.producer] in views else None
            for (tensor, _), storage in pairs
        ]

    @cached_property
    def _sole_storages(self) -> Sequence[GradientStorage | None]:
        """The one storage of the stage that the gradient of each input fills, if there is one."""
        storages: list[GradientStorage | None] = []
        for tensor, place in self.stage.inputs_with_gradient:
            storage = self._storage_with(tensor, place)
            fills = storage is not None and storage.bytes == tensor.gradient_bytes
            is_own = id(storage) in self.own_ids
            storages.append(storage if fills and is_own else None)
        return storages

    def _storage_with(self, tensor: Tensor, place: int) -> GradientStorage | None:
        """Return where an input's gradient lies, if only the node at `place` gives one for it."""
        # Earlier stages read it too, but their gradients are added there. Later ones are not here.
        consumers = {self.place[name] for name in tensor.consumers_with_gradient}
        if consumers - self.stage.before != {place}:
            return None
        return self.ranges.gradient_on_edge.get((self.place[tensor.producer], place))

    @cached_property
    def parts(self) -> list[tuple[Tensor, GradientStorage]]:
        """The inputs whose gradients are parts of larger storages, which live to the end.

        The gradients of q, k and v lie in one storage if one kernel makes them, for example.
        """
        parts = []
        for tensor, place in self.stage.inputs_with_gradient:
            storage = self._storage_with(tensor, place)
            is_part = storage is not None and storage.bytes > tensor.gradient_bytes
            if storage is not None and is_part and not tensor.strided_copy_bytes:
                parts.append((tensor, storage))
        return parts

    def returned(self, *, is_input_backward: bool) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        """Yield the storages of input gradients that take memory when they are returned.

        Each comes with the inputs whose gradients lie in it, its size, and whether I holds it for W
        too. Gradients that lie in a received message take none, and so do those that only a later
        stage makes, through a view.
        """
        holds = is_input_backward and self.stage.has_input_backward
        held = {id(gradient) for gradient, _ in self.captured} if holds else set()
        for storage, tensors in self._inputs_by_storage(is_input_backward=is_input_backward):
            names = tuple(tensor.producer for tensor in tensors)
            yield names, tensors[-1].gradient_bytes, id(storage) in held

    @cached_property
    def relayed_gradients(self) -> Mapping[str, Sequence[str]]:
        """Outputs whose gradient buffer is reused as an input's gradient, with these inputs."""
        relayed: dict[str, list[str]] = defaultdict(list)
        for tensor, _ in self.stage.arriving:
            if not self.stage.gradient_givers(tensor):
                relayed[tensor.producer].append(tensor.producer)
        for tensor, _ in self.stage.inputs_with_gradient:
            view = self._sent_view_of(tensor)
            if view is not None:
                relayed[view].append(tensor.producer)
        return relayed

    @property
    def missing(self) -> Iterator[Tensor]:
        """Inputs that end here and get no gradient: zeros are sent in the first step only, and then
        nothing.
        """
        leaving = {tensor.producer for tensor in self.stage.leaving}
        for tensor, _ in self.stage.arriving:
            ends = tensor.producer not in leaving
            if tensor.gradient_bytes and ends and not self.stage.gradient_givers(tensor):
                yield tensor

    def _inputs_by_storage(
        self, *, is_input_backward: bool
    ) -> list[tuple[GradientStorage | None, list[Tensor]]]:
        """Return the inputs by the storage in which their gradients are returned; copies alone."""
        groups: dict[int, tuple[GradientStorage | None, list[Tensor]]] = {}
        storages = self.return_storages(is_input_backward=is_input_backward)
        pairs = zip(self.stage.inputs_with_gradient, storages, strict=True)
        for index, ((tensor, _), storage) in enumerate(pairs):
            if self._sent_view_of(tensor) is None:
                # Each copy is a storage of its own.
                key = -index - 1 if storage is None else id(storage)  # ids are never negative
                groups.setdefault(key, (storage, []))[1].append(tensor)
        return list(groups.values())

    def _sent_view_of(self, tensor: Tensor) -> str | None:
        """Return the view that the stage makes of an input only for later stages, if it is sent."""
        places = list(self.ranges.views_of(tensor.producer, self.inside))
        if not places:
            return None
        view = self.ranges.tensor_of.get(self.graph.nodes[places[-1]].name)
        if view is None or not view.consumers:
            return None
        if any(self.place[name] in self.inside for name in view.consumers):
            return None
        return view.producer if tensor.is_dense and view.is_dense else None

    # -- which gradients are the stage's own

    @cached_property
    def own(self) -> list[GradientStorage]:
        """The gradients that are made here.

        A gradient from a later stage is contiguous as it arrives: the copy that would make it so in
        one process is not made.
        """
        return [
            gradient
            for place in self.nodes
            for gradient in self.ranges.gradients.get(place, ())
            if not (gradient.is_copy and place in self._read_later_only)
        ]

    @cached_property
    def own_ids(self) -> set[int]:
        """The identities of the gradients that are made here."""
        return set(map(id, self.own))

    @cached_property
    def _read_later_only(self) -> set[int]:
        """The nodes that get gradients only from later stages, at once or through views."""
        read_here = {
            receiver for place in self.nodes for receiver in self.ranges.gradient_receivers[place]
        }
        leaving = {self.place[tensor.producer] for tensor in self.stage.leaving}
        later_only = leaving - read_here
        # From the outputs on: a node whose sole view is read later only is read later only too.
        for place in reversed(self.nodes):
            if self.ranges.sole_view.get(place) in later_only:
                later_only.add(place)
        return later_only

    # -- when gradients of tensors live

    def flow_changes(self, *, is_input_backward: bool = False) -> Iterator[LivenessChange]:
        """Yield when gradients of tensors begin and end to live.

        An input backward keeps those that flow into nodes with parameters.
        """
        storages = self.return_storages(is_input_backward=is_input_backward)
        held = {id(gradient) for gradient, _ in self.held_between} if is_input_backward else set()
        with_parts = {id(storage) for _, storage in self.parts} - held
        stay = held.union(map(id, storages))
        for gradient in self.own:
            yield LivenessChange(self.place[gradient.producer], gradient.bytes, begins=True)
            # What is returned or held for W has no end here: it lives on when the backward is done.
            if id(gradient) not in stay:
                is_whole = id(gradient) not in with_parts
                last = self._last_place(gradient) if is_whole else self.nodes[0]
                yield LivenessChange(last, gradient.bytes, begins=False)
        copied_at_end = {tensor.producer for tensor, _ in self.parts if is_input_backward}
        pairs = zip(self.stage.inputs_with_gradient, storages, strict=True)
        for (tensor, place), storage in pairs:
            if storage is None:  # autograd copies it: others hold it too, or it is not contiguous
                at = self.nodes[0] if tensor.producer in copied_at_end else place
                yield LivenessChange(at, tensor.gradient_bytes, begins=True)

    def _last_place(self, gradient: GradientStorage) -> int:
        """Return the node of the stage in whose backward the gradient is freed."""
        last = self.place[gradient.last]
        if last in self.inside:
            return last
        # It ends in another stage: here the last one to touch it counts.
        users = (self.place[name] for name in (*gradient.readers, *gradient.captured_at))
        return min(self.inside.intersection(users), default=self.place[gradient.producer])

    def weight_backward_changes(self) -> Iterator[LivenessChange]:
        """Yield when W frees what I held for it, and when gradients live that only W makes."""
        for gradient, place in self.held_between:
            yield LivenessChange(place, gradient.bytes, begins=False)
        for gradient in filter(self.stage.split_backward.is_for_parameters_only, self.own):
            yield LivenessChange(self.place[gradient.producer], gradient.bytes, begins=True)
            yield LivenessChange(self.place[gradient.last], gradient.bytes, begins=False)

    # -- when gradients of parameters live

    def parameter_changes(
        self, *, has_gradients: bool, is_weight_backward: bool = False
    ) -> Iterator[LivenessChange]:
        """Yield when gradients of parameters begin and end to live in a backward.

        The first backward of a step makes them, and they stay. Later ones (`has_gradients`) add to
        them, and need another one only where several nodes read a parameter: their gradients are
        summed before that. In W, the gradients that I made are only copied or added.
        """
        made_before = self._input_backward_names if is_weight_backward else frozenset()
        for parameter, places in self.stage.trained_parameters:
            is_made = parameter.name in made_before
            if not has_gradients:
                place = self.nodes[0] if is_made else places[-1]
                yield LivenessChange(place, parameter.bytes, begins=True)
            elif len(places) > 1 and not is_made:
                yield LivenessChange(places[-1], parameter.bytes, begins=True)
                yield LivenessChange(places[0], parameter.bytes, begins=False)
        if not has_gradients:
            for place, node in zip(self.nodes, self.stage.own_nodes, strict=True):
                if not node.parameters:  # parameters without names count with their node
                    yield LivenessChange(place, node.parameter_bytes, begins=True)

    # -- what the kernels of each node make live

    def input_backward_rises(self) -> Iterator[int]:
        """Yield by node what it makes live in I: without most gradients of parameters."""
        for node in self.stage.own_nodes:
            names = set(node.parameters) - self.stage.split_backward.input_backward_parameters
            parameters = (self.graph.parameter_by_name[name] for name in names)
            # A node's peak was measured in a whole backward; these are the gradients that W makes.
            left_to_weights = sum(p.bytes for p in parameters if p.trainable)
            if node.operator in ONE_KERNEL_BACKWARDS:
                left_to_weights = 0
            yield max(0, node.backward_peak_bytes - left_to_weights)

    def weight_backward_rises(self) -> Iterator[int]:
        """Yield by node what it makes live in W: only nodes that lead to parameters run there."""
        split, not_made = self.stage.split_backward, defaultdict[int, int](int)
        for gradient in self.own:
            place = self.place[gradient.producer]
            is_made = self._has_one_kernel(place) or split.is_for_parameters_only(gradient)
            # Sums are made between nodes, and no part of a node's peak.
            if not gradient.is_sum and not is_made:
                not_made[place] += gradient.bytes
        for parameter, places in self.input_backward_parameters:
            for place in places:
                if not self._has_one_kernel(place):
                    not_made[place] += parameter.bytes
        for place, node in zip(self.nodes, self.stage.own_nodes, strict=True):
            runs = place in split.weight_backward_places
            yield max(0, node.backward_peak_bytes - not_made[place]) if runs else 0

    def _has_one_kernel(self, place: int) -> bool:
        return self.graph.nodes[place].operator in ONE_KERNEL_BACKWARDS
