"""Segments: runs of a stage's nodes, each of which gets a menu of its own (see menus.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipecompile.memory_model.recompute_problem import RecomputeProblem

__all__ = ["SHORTEST", "segment_cuts"]

# In nodes. The time to fill a menu grows with the cube of its length; shorter segments leave more
# pairs to be joined, each of which is pruned.
SHORTEST, LONGEST = 12, 64


def segment_cuts(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return the positions between segments, without 0 and the end of the stage.

    `blocks` names for each position the block of the model that it lies in. Segments end where
    blocks end; short ones are joined, and long ones are cut further where least is live.
    """
    length = len(blocks)
    allowed = set(problem.boundaries)
    edges = [0]
    for position in range(1, length):
        ends_block = blocks[position] != blocks[position - 1]
        if ends_block and position in allowed and position - edges[-1] >= SHORTEST:
            edges.append(position)
    # A short rest joins the segment before it.
    if len(edges) > 1 and length - edges[-1] < SHORTEST:
        edges.pop()
    edges.append(length)
    cuts: list[int] = []
    for start, stop in pairwise(edges):
        cuts += [*_inner_cuts(problem, start, stop), stop]
    return tuple(cuts[:-1])


def _inner_cuts(problem: RecomputeProblem, start: int, stop: int) -> tuple[int, ...]:
    """Return further cuts of a long segment: in its middle third, where least is live."""
    if stop - start <= LONGEST:
        return ()
    third = (stop - start) // 3
    middle_third = [p for p in problem.boundaries if start + third <= p <= stop - third]
    if not middle_third:
        return ()

    def badness(position: int) -> tuple[int, int, int]:
        from_middle = abs(2 * position - start - stop)
        return _live_bytes(problem, position), from_middle, position

    cut = min(middle_third, key=badness)
    return (*_inner_cuts(problem, start, cut), cut, *_inner_cuts(problem, cut, stop))


def _live_bytes(problem: RecomputeProblem, position: int) -> int:
    """Return the bytes that are produced before `position` and used there or later."""
    return sum(t.bytes for t in problem.tensors if t.producer < position <= t.last_use)
