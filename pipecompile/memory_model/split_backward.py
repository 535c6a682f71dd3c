"""Where the two halves of a stage's backward run: the first for the gradients of inputs, the second for parameters'.

As runtime/split_backward.py has it, by places of nodes. Part of the memory model, see memory.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from pipecompile.ir.graph import GradientStorage
from pipecompile.memory_model.live_ranges import LiveRanges

__all__ = ["SplitBackward"]

Begin = int | Literal["outputs", "first half"]
"""Where the second half begins for a parameter: at a node, at the outputs, or not at all."""


@dataclass(frozen=True)
class SplitBackward:
    """Of the stage of `nodes`, after the nodes `before` it; `readers` are those of parameters that get a gradient.

    Later stages have gradients for those that are `sent`.
    """

    lives: LiveRanges
    before: frozenset[int]
    nodes: tuple[int, ...]
    readers: Mapping[str, Collection[int]]
    sent: frozenset[int]

    def captured_at(self, gradient: GradientStorage) -> set[int]:
        """Where the second half begins with it."""
        return self._capturing.intersection(map(self.lives.place.__getitem__, gradient.captured_at))

    def end_of_second(self, place: int) -> int:
        """The last node that the second half runs of what it begins at `place`."""
        found = waiting = {place}
        while waiting:
            sources = set(chain.from_iterable(self.lives.sources[each] for each in waiting))
            waiting = (sources & self._later) - found
            found = found | waiting
        return min(found)

    def is_aside(self, gradient: GradientStorage) -> bool:
        """Whether it leads to parameters alone, whose gradients are made in the second half, as it is."""
        return self.lives.place[gradient.last] in self._later and not self.captured_at(gradient)

    @cached_property
    def early(self) -> frozenset[str]:
        """The parameters whose gradients the first half makes: a later walk from where they hang off would pass others.

        The second half adds them to what is there.
        """
        return frozenset(name for name, begin in self._begins.items() if begin == "first half")

    @cached_property
    def run_twice(self) -> set[int]:
        """The nodes of which the second half runs something."""
        return {*self._capturing, *self._later}

    @cached_property
    def passed_twice(self) -> set[int]:
        """What the second half leads through: where it begins, and all before that; all if it begins at outputs."""
        if self.begins_at_outputs:
            return set(self.nodes)
        found = set(self._capturing)
        waiting = list(found)
        while waiting:
            before = self._inside.intersection(self.lives.sources[waiting.pop()]) - found
            found |= before
            waiting += before
        return found

    @property
    def begins_at_outputs(self) -> bool:
        """Whether it does for any parameter."""
        return "outputs" in self._begins.values()

    @cached_property
    def _inside(self) -> frozenset[int]:
        return frozenset(self.nodes)

    @cached_property
    def _on_the_way(self) -> set[int]:
        """The nodes whose gradients lead to inputs of the stage."""
        found: set[int] = set()
        for place in self.nodes:
            if any(
                source in self.before or source in found for source in self.lives.sources[place]
            ):
                found.add(place)
        return found

    @cached_property
    def _aside(self) -> set[int]:
        """The nodes whose gradients lead to parameters alone."""
        return self._leading({place for places in self.readers.values() for place in places})

    def _leading(self, reading: Collection[int]) -> set[int]:
        """The nodes whose gradients lead to such as are `reading`, and to no inputs."""
        found: set[int] = set()
        for place in self.nodes:
            leads = place in reading or not found.isdisjoint(self.lives.sources[place])
            if leads and place not in self._on_the_way:
                found.add(place)
        return found

    @cached_property
    def _hanging(self) -> dict[int, Begin]:
        """By node aside where a walk to it begins: at the node on the way that it hangs off, if that is one."""
        met: dict[int, set[Begin]] = {
            place: {"outputs"} if place in self.sent else set() for place in self._aside
        }
        found: dict[int, Begin] = {}
        for place in reversed(self.nodes):
            if place in self._aside:
                found[place] = _only(met[place] or {"outputs"})
            for source in self._aside.intersection(self.lives.sources[place]):
                met[source].add(found.get(place, place))
        return found

    @cached_property
    def _begins(self) -> dict[str, Begin]:
        """By parameter where a walk to it begins."""
        return {
            name: _only({self._begin(name, place) for place in places})
            for name, places in self.readers.items()
        }

    def _begin(self, name: str, place: int) -> Begin:
        """The same of a parameter that one node reads."""
        is_early = name in self.lives.graph.nodes[place].gradients_by_input_backward
        return (
            "first half"
            if is_early and place in self._on_the_way
            else self._hanging.get(place, place)
        )

    @cached_property
    def _capturing(self) -> set[int]:
        """Where the second half begins: for parameters that the node reads, or for nodes aside that it does."""
        own = {
            place
            for name, places in self.readers.items()
            for place in places
            if self._begins[name] == place
        }
        return own | self._joining

    @cached_property
    def _joining(self) -> set[int]:
        """Where it begins for nodes aside."""
        return {
            place
            for place in self._on_the_way
            if any(
                self._hanging[source] == place
                for source in self._later.intersection(self.lives.sources[place])
            )
        }

    @cached_property
    def _later(self) -> set[int]:
        """The nodes aside that the second half runs."""
        return self._leading(
            {p for name, places in self.readers.items() for p in places if name not in self.early}
        )


def _only(begins: Iterable[Begin]) -> Begin:
    """The one that there is."""
    found = set(begins)
    return found.pop() if len(found) == 1 else "first half"
