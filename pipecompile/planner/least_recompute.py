"""What a policy recomputes at least, whatever the cut: times by node, and what of them a cut may
spare.

`step_bound` imports it when it judges a policy, and not before: it needs numpy, which reading a
plan does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.graph import CostGraph
from pipecompile.ir.module_paths import block_of

__all__ = ["GuardedNodes", "Reachability"]


class GuardedNodes(NamedTuple):
    """The `ns` that `block` and `sqrt` recompute of each node, by place, in every stage but the
    last; of each boundary between stages no more than `spared_ns` is left out.
    """

    ns: tuple[int, ...]
    spared_ns: int


class Reachability:
    """Which nodes of a graph lie behind which: all that follow from them, by place."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph

    @cached_property
    def behind(self) -> NDArray[np.bool_]:
        """A matrix whose row n marks node n and all nodes that follow from its value."""
        places, count = self.graph.places, len(self.graph.nodes)
        behind = np.eye(count, dtype=np.bool_)
        readers = {tensor.producer: tensor.consumers for tensor in self.graph.tensors}
        # Backwards, so that the rows of all readers are known.
        for place in reversed(range(count)):
            for name in readers.get(self.graph.nodes[place].name, ()):
                behind[place] |= behind[places[name]]
        return behind

    def sums_behind(self, values: Sequence[int]) -> list[int]:
        """Return by node the sum of the values of all nodes that lie behind it, and of its own.

        A stage is the last one: what lies behind its nodes is in it too.
        """
        all_values = np.array(values, dtype=np.int64)
        return [int(all_values[row].sum()) for row in self.behind]

    @cached_property
    def guarded(self) -> GuardedNodes:
        """The nodes that one region for each block, or for several, recomputes for certain.

        A recompute runs until the last saver of its region. In each block, the last saver ℓ that
        lies behind the one of the block before is a milestone, and a node is guarded that lies
        between two milestones:

            block     0         1              2
            node      a ─▶ ℓ₀ ─▶ b ─▶ c ─▶ ℓ₁ ─▶ d ─▶ ℓ₂
            stage     0    0    0  │  1    1      1    1        b is the last saver of its region

        It is recomputed if its stage has the next milestone as well. Stages never decrease from one
        milestone to the next, so that each boundary parts the nodes of one block at most; what then
        precedes the boundary spares no more than its last saver and what saves nothing.
        """
        # No cut is known here: only what all of them recompute counts.
        ns, spared = [0] * len(self.graph.nodes), 0
        before = -1
        for run in self._runs():
            milestone = self._milestone(run, before)
            if milestone is None:
                continue
            inside = [place for place in self._between(run, before, milestone) if place < milestone]
            for place in inside:
                ns[place] = self._forward_ns(place)
            # Else the recompute ends before the kernels of the milestone itself.
            if self.graph.nodes[milestone].saves_at == "after":
                ns[milestone] = self._forward_ns(milestone)
            # What a boundary in this block spares at most: one saver, and all that saves nothing.
            savers = [self._forward_ns(place) for place in inside if self._saves(place)]
            others = (self._forward_ns(place) for place in inside if not self._saves(place))
            spared = max(spared, max(savers, default=0) + sum(others))
            before = milestone
        return GuardedNodes(tuple(ns), spared)

    def _runs(self) -> Iterator[list[int]]:
        """Yield the places of each block that follow each other; what no region may have parts
        them.
        """
        nodes, parts = self.graph.nodes, 0
        keys: list[tuple[str, int]] = []
        for node in nodes:
            # A node that must not run twice ends a region before
            # it, and the next one begins behind it.
            parts += not node.is_recomputable
            keys.append((block_of(node.module), parts))
        for _, run in groupby(range(len(nodes)), key=keys.__getitem__):
            yield [place for place in run if nodes[place].is_recomputable]

    def _milestone(self, run: Sequence[int], before: int) -> int | None:
        """Return the last saver of a run between the milestone `before` and the last of all."""
        # Where none saves anything there is no milestone, whatever the last one is.
        last = max(filter(self._saves, range(len(self.graph.nodes))), default=-1)
        return max(filter(self._saves, self._between(run, before, last)), default=None)

    def _between(self, run: Sequence[int], before: int, after: int) -> Iterator[int]:
        """Yield the places of a run that lie behind `before`, unless that is -1, and `after` behind
        them.
        """
        for place in run:
            if self.behind[place, after] and (before < 0 or self.behind[before, place]):
                yield place

    def _saves(self, place: int) -> bool:
        return self.graph.nodes[place].saves_at != "never"

    def _forward_ns(self, place: int) -> int:
        """Return the forward of a node; 0 if it is copied, and so in several stages."""
        node = self.graph.nodes[place]
        return 0 if node.name in self.graph.copied_set else node.forward_ns
