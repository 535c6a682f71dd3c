"""A stage as a section of its graph: what comes in and goes out, and which parameters get a gradient in it.

Part of the memory model, see memory.py.
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
    """At the node of this place a storage of so many bytes begins to live, or ends."""

    place: int
    bytes: int
    begins: bool


class StageSubgraph:
    """One stage as a part of the graph: its `nodes` by place, in order; those `before` it are in earlier stages."""

    def __init__(self, lives: LiveRanges, before: set[int], nodes: Sequence[int]) -> None:
        self.lives, self.graph = lives, lives.graph
        self.before, self.nodes, self.inside = before, nodes, set(nodes)
        self.own = [self.graph.nodes[place] for place in nodes]
        self.arriving = list(lives.crossing(before))  # to be read here or handed on

    def is_later(self, place: int) -> bool:
        """Whether the node of this place lies in a later stage."""
        return place not in self.inside and place not in self.before

    @property
    def leaving(self) -> Iterator[Tensor]:
        """What a later stage reads of this stage or of an earlier one."""
        return (tensor for tensor, _ in self.lives.crossing(self.before | self.inside))

    @property
    def read(self) -> Iterator[Tensor]:
        """What arrives and is read here."""
        return (tensor for tensor, readers in self.arriving if not self.inside.isdisjoint(readers))

    @cached_property
    def given(self) -> list[tuple[Tensor, int]]:
        """What arrives and is given a gradient here, with the place where that is complete."""
        places = [(tensor, self.giving(tensor)) for tensor, _ in self.arriving]
        return [(tensor, min(inside)) for tensor, inside in places if inside]

    def giving(self, tensor: Tensor) -> set[int]:
        """The nodes of the stage that give a gradient for it."""
        return self.inside.intersection(
            map(self.lives.place.__getitem__, tensor.consumers_with_gradient)
        )

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The nodes of the stage that read each parameter."""
        found: dict[str, list[int]] = defaultdict(list)
        for place in self.nodes:
            for name in self.graph.nodes[place].parameters:
                found[name].append(place)
        return found

    @cached_property
    def trained(self) -> list[tuple[Parameter, list[int]]]:
        """The parameters that get a gradient, with the nodes of the stage that read them."""
        pairs = [
            (self.graph.parameter_by_name[name], places) for name, places in self.readers.items()
        ]
        return [(parameter, places) for parameter, places in pairs if parameter.trainable]

    @cached_property
    def splits(self) -> bool:
        """Whether a backward has two halves: a first stage has no gradients of inputs to compute."""
        return any(tensor.gradient_bytes for tensor, _ in self.arriving)

    @cached_property
    def halves(self) -> SplitBackward:
        """Where the halves of a split backward run."""
        readers = {parameter.name: places for parameter, places in self.trained}
        sent = frozenset(
            self.lives.place[tensor.producer] for tensor in self.leaving if tensor.gradient_bytes
        )
        return SplitBackward(self.lives, frozenset(self.before), tuple(self.nodes), readers, sent)
