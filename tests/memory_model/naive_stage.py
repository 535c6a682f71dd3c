"""The gradients that flow through one stage, found the long way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pipecompile.ir.graph import Tensor
from tests.memory_model.naive_encodings import Key
from tests.memory_model.naive_split import NaiveSplit

__all__ = ["NaiveStage"]


class NaiveStage(NaiveSplit):
    """A stage with all that lives in it, and when."""

    def adds_to_view(self, parameter: str, node: str) -> bool:
        """Whether a gradient is added here to a view, which cannot be done in place."""
        readers = self.trained_parameters()[parameter]
        return (
            readers[-2:-1] == [node] and parameter in self.graph.by_name[readers[-1]].view_gradients
        )

    def gradient_lives(
        self, *, is_input_backward: bool
    ) -> Iterator[tuple[Key, int, str, str | None]]:
        """Yield gradients of tensors: key, bytes, the node that makes it and the one that frees it.

        The latter is None for a gradient that is returned. An input backward also returns what
        others hold.
        """
        homes = self.return_storages(is_input_backward=is_input_backward)
        for number, gradient in self.gradients():
            last: str | None = gradient.last
            is_held = (
                is_input_backward and self.has_input_backward and self.capture_places(gradient)
            )
            if number in homes.values() or (number in self.parts.values() and not is_held):
                last = None
            elif self.stage_of[gradient.last] != self.index:
                last = next(
                    iter(self.inside([*gradient.readers, *gradient.captured_at])),
                    gradient.producer,
                )
            yield (
                ("complete" if last is None else "own", number),
                gradient.bytes,
                gradient.producer,
                last,
            )
        for tensor in self.inputs_with_gradient():
            if tensor.producer not in homes and not (
                is_input_backward and tensor.producer in self.parts
            ):
                reader = self.completing_node(tensor)
                yield ("complete", "copy", tensor.producer), tensor.gradient_bytes, reader, None

    def return_storages(self, *, is_input_backward: bool) -> dict[str, int]:
        """Return by input the gradient of this stage that is returned for it; others are copies."""
        sizes = {number: gradient.bytes for number, gradient in self.gradients()}
        return {
            tensor.producer: number
            for tensor in self.inputs_with_gradient()
            if is_input_backward or tensor.is_permuted or self.is_read_by_view(tensor)
            for number in self.sole_storage(tensor)
            if sizes.get(number) == tensor.gradient_bytes
        }

    @cached_property
    def parts(self) -> dict[str, int]:
        """By input the larger gradient of which its own is a part, and which lives to the end."""
        return {
            tensor.producer: number
            for tensor in sorted(
                self.inputs_with_gradient(), key=lambda each: self.order.index(each.producer)
            )
            if not tensor.strided_copy_bytes
            for number in self.sole_storage(tensor)
            if self.graph.gradients[number].bytes > tensor.gradient_bytes
        }

    def sole_storage(self, tensor: Tensor) -> list[int]:
        """Return the one storage of an input's gradient, if only one node gives it."""
        collected = self.storages_on_edge((tensor.producer, self.completing_node(tensor)))
        return collected if len(collected) == 1 and self.has_one_giver(tensor) else []

    def is_read_by_view(self, tensor: Tensor) -> bool:
        """Whether the only reader of a tensor is a view of all of it."""
        views = [
            t
            for t in self.graph.tensors
            if [t.producer] == list(tensor.consumers) and t.storage is not None
        ]
        return [(t.storage, t.gradient_bytes) for t in views] == [
            (tensor.storage, tensor.gradient_bytes)
        ]

    def completing_node(self, tensor: Tensor) -> str:
        """Return the node in whose backward the gradient of an input is complete."""
        return self.inside(tensor.consumers_with_gradient)[0]

    def has_one_giver(self, tensor: Tensor) -> bool:
        """Whether only one node of this or a later stage gives the gradient, and it is here."""
        return [
            name for name in tensor.consumers_with_gradient if self.stage_of[name] >= self.index
        ] == [self.completing_node(tensor)]

    def inputs_with_gradient(self) -> list[Tensor]:
        """Return the inputs for which the stage makes a gradient."""
        return [
            tensor for tensor in self.read_inputs() if self.inside(tensor.consumers_with_gradient)
        ]

    def is_only_viewed(self, tensor: Tensor) -> bool:
        """Whether only later stages read an input, through views that are sent as they are."""
        is_dense = tensor.is_dense
        while len(tensor.consumers) == 1 and tensor.storage is not None:
            (reader,) = tensor.consumers
            views = [
                t for t in self.graph.tensors if t.producer == reader and self.inside([reader])
            ]
            same = [t for t in views if t.storage == tensor.storage]
            if [t.gradient_bytes for t in same] != [tensor.gradient_bytes]:
                return False
            (tensor,) = same
            if not self.inside(tensor.consumers):
                return bool(tensor.consumers) and is_dense and tensor.is_dense
        return False

    def summand_bytes(self, node: str, *, is_input_backward: bool) -> int:
        """Return the bytes of summands beside new sums.

        A sum that could be in place is new if its first summand was received or is held.
        """
        waiting = {
            number
            for number, gradient in self.gradients()
            if is_input_backward and self.capture_places(gradient)
        }
        sizes = [
            g.bytes
            for _, g in self.gradients()
            if g.producer == node and g.is_sum and g.continues is None
        ]
        staying = waiting.union(
            self.return_storages(is_input_backward=is_input_backward).values(), self.parts.values()
        )
        read = {t.producer for t in self.graph.tensors if node in t.consumers_with_gradient}
        first = sum(
            gradient.bytes
            for number, gradient in self.gradients()
            if gradient.last == node
            and sizes
            and gradient.bytes >= sizes[-1]
            and number not in staying
            if any(name in read and reader != node for name, reader in gradient.edges)
        )
        summed = (
            self.trained_parameters() if not is_input_backward else self.input_backward_parameters()
        )
        new = sum(2 * self.size(name) for name in summed if self.adds_to_view(name, node))
        return (
            first
            + new
            + sum(
                gradient.bytes
                for _, gradient in self.gradients()
                if gradient.producer == node and gradient.is_sum
                if gradient.continues in (None, *waiting)
                or self.stage_of[self.graph.gradients[gradient.continues or 0].producer]
                > self.index
            )
        )

    def relays_gradient(self, name: str) -> bool:
        """Whether an input's gradient lies in what was received for an output."""
        return bool(self.returns_as(name))

    def returns_as(self, name: str) -> list[str]:
        """Return the inputs whose gradients lie in what was received for an output."""
        arriving = [t for t in self.graph.tensors if self.arrives(t.producer, t.consumers)]
        passing = [
            tensor.producer
            for tensor in arriving
            if not self.inside(tensor.consumers_with_gradient)
        ]
        viewed = [
            t for t in arriving if self.inside(t.consumers_with_gradient) and self.is_only_viewed(t)
        ]
        return [
            *(each for each in passing if each == name),
            *(t.producer for t in viewed if self.last_view(t) == name),
        ]

    def last_view(self, tensor: Tensor) -> str:
        """Return the view that is sent of an input that is only viewed."""
        while self.inside(tensor.consumers):
            (tensor,) = [
                view for view in self.graph.tensors if [view.producer] == list(tensor.consumers)
            ]
        return tensor.producer

    def returned(self, *, is_input_backward: bool) -> dict[Any, tuple[int, list[str]]]:
        """Return the gradients of inputs that take memory: size, and the inputs that lie in it."""
        homes = self.return_storages(is_input_backward=is_input_backward)
        collected: dict[Any, tuple[int, list[str]]] = {}
        for tensor in self.inputs_with_gradient():
            home = homes.get(tensor.producer, tensor.producer)
            if not self.is_only_viewed(tensor):
                _, names = collected.get(home, (0, []))
                collected[home] = tensor.gradient_bytes, [*names, tensor.producer]
        return collected
