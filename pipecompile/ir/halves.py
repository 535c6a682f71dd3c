"""Where the two halves of a stage's backward run: the first for the gradients of inputs, the second for parameters'.

As runtime/halves.py has it, by places of nodes. Part of the memory model, see memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from pipecompile.ir.lives import GradientLife, Lives

__all__ = ["Halves"]


@dataclass(frozen=True)
class Halves:
    """Of the stage of `nodes`, after the nodes `before` it; some are `reading` parameters that get a gradient.

    Later stages have gradients for those that are `sent`.
    """

    lives: Lives
    before: frozenset[int]
    nodes: tuple[int, ...]
    reading: frozenset[int]
    sent: frozenset[int]

    def captured_at(self, gradient: GradientLife) -> set[int]:
        """Where the second half begins with it."""
        read = (self.reading & self._on_the_way).intersection(gradient.captured)
        return {*read, *self._joining.intersection(gradient.joined)}

    def end_of_second(self, place: int) -> int:
        """The last node that the second half runs of what it begins at `place`."""
        found = waiting = {place}
        while waiting:
            sources = set(chain.from_iterable(self.lives.sources[each] for each in waiting))
            waiting = (sources & self._aside) - found
            found = found | waiting
        return min(found)

    def is_aside(self, gradient: GradientLife) -> bool:
        """Whether it leads to parameters alone."""
        return gradient.last in self._aside

    @cached_property
    def run_twice(self) -> set[int]:
        """The nodes of which the second half runs something."""
        return {*self.reading, *self._joining, *self._aside}

    @cached_property
    def passed_twice(self) -> set[int]:
        """What the second half leads through: where it begins, and all before that; all if it begins at outputs."""
        if self.begins_at_outputs:
            return set(self.nodes)
        found = {*(self.reading & self._on_the_way), *self._joining}
        waiting = list(found)
        while waiting:
            before = self._inside.intersection(self.lives.sources[waiting.pop()]) - found
            found |= before
            waiting += before
        return found

    @property
    def begins_at_outputs(self) -> bool:
        """Whether any of these leads to parameters alone."""
        return not self._aside.isdisjoint(self.sent)

    @cached_property
    def _inside(self) -> frozenset[int]:
        return frozenset(self.nodes)

    @cached_property
    def _on_the_way(self) -> set[int]:
        """The nodes whose gradients lead to inputs of the stage."""
        found: set[int] = set()
        for place in self.nodes:
            if any(source in self.before or source in found for source in self.lives.sources[place]):
                found.add(place)
        return found

    @cached_property
    def _aside(self) -> set[int]:
        """The nodes whose gradients lead to parameters alone."""
        found: set[int] = set()
        for place in self.nodes:
            leads = place in self.reading or not found.isdisjoint(self.lives.sources[place])
            if leads and place not in self._on_the_way:
                found.add(place)
        return found

    @cached_property
    def _joining(self) -> set[int]:
        """Where those meet others."""
        return {place for place in self._on_the_way if not self._aside.isdisjoint(self.lives.sources[place])}
