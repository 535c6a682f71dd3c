"""Which nodes the halves of a split backward run, found the long way."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pipecompile.ir.graph import GradientStorage
from tests.memory_model.naive_encodings import Key
from tests.memory_model.naive_storages import NaiveStorages

__all__ = ["NaiveSplit"]


class NaiveSplit(NaiveStorages):
    """A stage with the gradients that are made in it, and who makes those of parameters."""

    def needs_for_weight_backward(self, name: str) -> bool:
        """Whether a weight backward needs an input: it is saved, or autograd's nodes lead to it."""
        (tensor,) = [t for t in self.graph.tensors if t.producer == name]
        is_all = self.begins_at_outputs or not self.has_input_backward
        passed = [
            node.name for node in self.nodes if is_all or node.name in self.weight_backward_reach
        ]
        if any(reader in passed for reader in tensor.consumers_with_gradient):
            return True
        saved = [self.graph.by_name[name].saved for name in passed]
        return not tensor.strided_copy_bytes and any(tensor.storage in each for each in saved)

    def trained_parameters(self) -> dict[str, list[str]]:
        """Return the nodes of the stage that read each parameter which gets a gradient."""
        trained = [parameter.name for parameter in self.graph.parameters if parameter.trainable]
        readers = {
            name: [node.name for node in self.nodes if name in node.parameters] for name in trained
        }
        return {name: nodes for name, nodes in readers.items() if nodes}

    def size(self, parameter: str, *, trained: bool = False) -> int:
        collected = self.graph.parameter_by_name[parameter]
        return collected.bytes * (collected.trainable or not trained)

    def gradients(self) -> list[tuple[int, GradientStorage]]:
        """Return the gradients that are made here, without copies of received ones."""
        own = [
            (n, g)
            for n, g in enumerate(self.graph.gradients)
            if self.stage_of[g.producer] == self.index
        ]
        return [(n, g) for n, g in own if not (g.is_copy and self.comes_from_later(g.producer))]

    def nodes_sharing(self, number: int, name: str) -> set[str]:
        """Return the nodes before a node whose gradients lie in the same storage."""
        collected: set[str] = set()
        for tensor in self.graph.tensors:
            is_read = name in tensor.consumers and tensor.gradient_bytes
            if is_read and self.storages_on_edge((tensor.producer, name)) == [number]:
                collected |= {tensor.producer, *self.nodes_sharing(number, tensor.producer)}
        return collected

    def storages_on_edge(self, pair: tuple[str, str]) -> list[int]:
        """Return the storages in which the gradient of an edge lies."""
        return [n for n, gradient in enumerate(self.graph.gradients) if pair in gradient.edges]

    def comes_from_later(self, name: str) -> bool:
        """Whether all of a node's gradient comes from later stages, at once or through views."""
        tensors = [tensor for tensor in self.graph.tensors if tensor.producer == name]
        read = self.inside(
            reader for tensor in tensors for reader in tensor.consumers_with_gradient
        )
        if not read:
            return self.is_later(reader for tensor in tensors for reader in tensor.consumers)
        (tensor,) = tensors
        views = [
            t
            for t in self.graph.tensors
            if [t.producer] == list(tensor.consumers) and t.storage is not None
        ]
        alike = [
            t
            for t in views
            if (t.storage, t.gradient_bytes) == (tensor.storage, tensor.gradient_bytes)
        ]
        return bool(alike) and self.comes_from_later(alike[0].producer)

    @property
    def has_input_backward(self) -> bool:
        """Whether there are gradients of inputs to make."""
        return any(
            t.gradient_bytes and self.arrives(t.producer, t.consumers) for t in self.graph.tensors
        )

    def freed_in_weight_backward(self, key: Key) -> str | None:
        """Return where a weight backward frees a gradient; None for what is returned."""
        if not self.has_input_backward or key[0] != "own":
            return None
        captors = self.capture_places(dict(self.gradients())[key[1]])
        return (
            self.inside(
                [*captors, *(name for captor in captors for name in self.nodes_behind(captor))]
            )[0]
            if captors
            else None
        )

    def holds_received_gradient(self, name: str) -> bool:
        """Whether the input backward holds the gradient that it received for an output."""
        if not self.has_input_backward or self.begins_at_outputs:
            return True
        own = {number for number, _ in self.gradients()}
        return any(
            number not in own and self.capture_places(gradient) and name in self.outputs_of(number)
            for number, gradient in enumerate(self.graph.gradients)
        )

    def outputs_of(self, number: int) -> list[str]:
        """Return the outputs whose gradient a received one may be; all if that cannot be told."""
        gradient = self.graph.gradients[number]
        users = set(gradient.captured_at)
        names = [t.producer for t in self.graph.tensors if self.leaves(t.producer, t.consumers)]
        met = [name for name in names if {name, *self.nodes_sharing(number, name)} & users]
        return met or names

    def holds_returned(self, home: Any) -> bool:
        """Whether the input backward holds what it returns."""
        return self.has_input_backward and any(
            home == n and self.capture_places(gradient) for n, gradient in self.gradients()
        )

    def nodes_behind(self, name: str) -> list[str]:
        """Return the nodes that lead to parameters only and hang off a node."""
        aside = [source for source in self.receivers(name) if source in self.aside]
        return [*aside, *(each for source in aside for each in self.nodes_behind(source))]

    def capture_places(self, gradient: GradientStorage) -> list[str]:
        """Return where the weight backward begins with a gradient."""
        return self.inside(filter(self.begins, gradient.captured_at))

    def begins(self, name: str) -> bool:
        """Whether the weight backward begins at a node on the way to inputs."""
        return self.begins_for_its_parameters(name) or self.begins_for_nodes_aside(name)

    def begins_for_its_parameters(self, name: str) -> bool:
        """Whether the weight backward begins at a node for a parameter that the node reads."""
        reads = [
            parameter for parameter, nodes in self.trained_parameters().items() if name in nodes
        ]
        return name in self.to_inputs and any(
            self.origins(parameter) == {name} for parameter in reads
        )

    def begins_for_nodes_aside(self, name: str) -> bool:
        """Whether the weight backward begins at a node for nodes aside that it reads."""
        before = [source for source in self.receivers(name) if source in self.aside]
        return name in self.to_inputs and any(
            self.origins_of_node(source) == {name} for source in before
        )

    def origins_of_node(self, name: str) -> set[str]:
        """Return from which nodes on the way a backward comes to one aside; "" for the outputs."""
        tensors = [t for t in self.graph.tensors if t.producer == name and t.gradient_bytes]
        readers = self.inside(
            reader for tensor in tensors for reader in tensor.consumers_with_gradient
        )
        is_sent = any(self.is_later(tensor.consumers) for tensor in tensors)
        collected = {""} if is_sent or not readers else set[str]()
        for reader in readers:
            collected |= {reader} if reader in self.to_inputs else self.origins_of_node(reader)
        return collected

    def origins(self, parameter: str) -> set[str]:
        """Return the same for a parameter; with several, the input backward makes its gradient."""
        names = self.trained_parameters()[parameter]
        collected = {
            way
            for name in names
            for way in ({name} if name in self.to_inputs else self.origins_of_node(name))
        }
        at_once = any(
            name in self.to_inputs
            and parameter in self.graph.by_name[name].gradients_by_input_backward
            for name in names
        )
        return collected | ({"one of them", "another"} if at_once else set())

    def input_backward_parameters(self) -> list[str]:
        """Return the parameters whose gradients the input backward makes, and holds."""
        return self.parameters_of_several_origins() if self.has_input_backward else []

    def parameters_of_several_origins(self) -> list[str]:
        return [
            parameter for parameter in self.trained_parameters() if len(self.origins(parameter)) > 1
        ]

    def reads_later(self, name: str) -> bool:
        """Whether a node reads a parameter whose gradient the weight backward makes."""
        several = self.parameters_of_several_origins()
        return any(
            name in nodes
            for parameter, nodes in self.trained_parameters().items()
            if parameter not in several
        )

    def reads_trained(self, name: str) -> bool:
        return any(name in nodes for nodes in self.trained_parameters().values())

    def receivers(self, name: str) -> list[str]:
        """Return the stage's nodes for which a node makes a gradient."""
        tensors = (t for t in self.graph.tensors if name in t.consumers_with_gradient)
        return self.inside(tensor.producer for tensor in tensors)

    @cached_property
    def to_inputs(self) -> set[str]:
        """The nodes whose gradients lead to inputs."""
        collected: set[str] = set()
        for node in self.nodes:
            sources = [
                t.producer for t in self.graph.tensors if node.name in t.consumers_with_gradient
            ]
            if any(self.stage_of[source] < self.index or source in collected for source in sources):
                collected.add(node.name)
        return collected

    @cached_property
    def aside(self) -> set[str]:
        """The nodes whose gradients lead only to parameters, some of which W makes."""
        collected: set[str] = set()
        for name in self.inside(node.name for node in self.nodes):
            to_parameters = self.reads_later(name) or not collected.isdisjoint(self.receivers(name))
            if to_parameters and name not in self.to_inputs:
                collected.add(name)
        return collected

    @cached_property
    def weight_backward_reach(self) -> set[str]:
        """The nodes where the weight backward begins, and those that they depend on."""
        collected: set[str] = set()
        for node in reversed(self.nodes):
            readers = [
                r
                for t in self.graph.tensors
                if t.producer == node.name
                for r in t.consumers_with_gradient
            ]
            if self.begins(node.name) or not collected.isdisjoint(readers):
                collected.add(node.name)
        return collected

    @cached_property
    def begins_at_outputs(self) -> bool:
        return any(self.origins(parameter) == {""} for parameter in self.trained_parameters())
