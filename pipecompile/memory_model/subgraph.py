"""A stage as a subgraph: what comes in and goes out, and which parameters get a gradient in it.

`StageValues` and so stage.py build on it. Nodes are known by their places in the graph's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from pipecompile.ir.graph import Parameter, Tensor
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.split_backward import SplitBackward

__all__ = ["LivenessChange", "StageSubgraph"]


class LivenessChange(NamedTuple):
    """A storage of so many bytes begins to live in the node at `place`, or ends when it is done."""

    place: int
    bytes: int
    begins: bool


class StageSubgraph:
    """The nodes at the places `nodes`, in order; those `before` it are in earlier stages."""

    def __init__(self, ranges: LiveRanges, before: set[int], nodes: Sequence[int]) -> None:
        self.ranges, self.graph = ranges, ranges.graph
        self.before, self.nodes, self.inside = before, nodes, set(nodes)
        self.own_nodes = [self.graph.nodes[place] for place in nodes]
        self.arriving = list(ranges.crossing(before))  # to be read here, or relayed

    def is_later(self, place: int) -> bool:
        """Return whether the node at `place` lies in a later stage."""
        return place not in self.inside and place not in self.before

    @property
    def leaving(self) -> Iterator[Tensor]:
        """The tensors of this stage, or relayed by it, that a later stage reads."""
        return (tensor for tensor, _ in self.ranges.crossing(self.before | self.inside))

    @property
    def read_inputs(self) -> Iterator[Tensor]:
        """The tensors that arrive and are read here."""
        return (tensor for tensor, readers in self.arriving if not self.inside.isdisjoint(readers))

    @cached_property
    def inputs_with_gradient(self) -> list[tuple[Tensor, int]]:
        """The arriving tensors for which this stage makes a gradient, and where that is complete.

        Backwards run from the last node to the first, so it is complete at the first reader.
        """
        inputs = []
        for tensor, _ in self.arriving:
            givers = self.gradient_givers(tensor)
            if givers:
                inputs.append((tensor, min(givers)))
        return inputs

    def gradient_givers(self, tensor: Tensor) -> set[int]:
        """Return the nodes of the stage whose backwards make a gradient for `tensor`."""
        consumers = (self.ranges.place[name] for name in tensor.consumers_with_gradient)
        return self.inside.intersection(consumers)

    @cached_property
    def parameter_readers(self) -> dict[str, list[int]]:
        """The nodes of the stage that read each parameter."""
        readers: dict[str, list[int]] = defaultdict(list)
        for place in self.nodes:
            for name in self.graph.nodes[place].parameters:
                readers[name].append(place)
        return readers

    @cached_property
    def trained_parameters(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters that get a gradient, with the nodes of the stage that read them."""
        pairs = [
            (self.graph.parameter_by_name[name], places)
            for name, places in self.parameter_readers.items()
        ]
        return [(parameter, places) for parameter, places in pairs if parameter.trainable]

    @cached_property
    def has_input_backward(self) -> bool:
        """Whether a backward can be split: a first stage has no gradients of inputs to make."""
        return any(tensor.gradient_bytes for tensor, _ in self.arriving)

    @cached_property
    def split_backward(self) -> SplitBackward:
        """Which nodes the halves of a split backward run."""
        readers = {parameter.name: places for parameter, places in self.trained_parameters}
        sent = frozenset(
            self.ranges.place[tensor.producer] for tensor in self.leaving if tensor.gradient_bytes
        )
        return SplitBackward(self.ranges, frozenset(self.before), tuple(self.nodes), readers, sent)
