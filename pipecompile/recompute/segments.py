"""Where a stage is cut into segments, each of which has a menu of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipecompile.memory_model.recompute_problem import RecomputeProblem

__all__ = ["SHORTEST", "segments"]

SHORTEST, LONGEST = 12, 64  # nodes; the time for a menu grows with the cube


def segments(problem: RecomputeProblem, blocks: Sequence[str]) -> tuple[int, ...]:
    """The positions between segments: where a block of the model ends, short ones joined and long ones cut again.

    `blocks` says of each position which block it lies in. A cut is where least is used across.
    """
    ends = [place for place in range(1, len(blocks)) if blocks[place] != blocks[place - 1]]
    allowed = set(problem.boundaries)
    joined = [0]
    for place in (end for end in ends if end in allowed):
        if place - joined[-1] >= SHORTEST:
            joined.append(place)
    if len(joined) > 1 and len(blocks) - joined[-1] < SHORTEST:
        joined.pop()
    joined.append(len(blocks))
    return tuple(place for a, b in pairwise(joined) for place in (*_cuts(problem, a, b), b))[:-1]


def _cuts(problem: RecomputeProblem, start: int, stop: int) -> tuple[int, ...]:
    """Further cuts of a long run: near its middle, where least is used across."""
    if stop - start <= LONGEST:
        return ()
    third = (stop - start) // 3
    inner = [place for place in problem.boundaries if start + third <= place <= stop - third]
    if not inner:
        return ()
    middle = min(
        inner, key=lambda place: (_across(problem, place), abs(2 * place - start - stop), place)
    )
    return (*_cuts(problem, start, middle), middle, *_cuts(problem, middle, stop))


def _across(problem: RecomputeProblem, place: int) -> int:
    return sum(held.bytes for held in problem.held if held.made < place <= held.last)
