"""Where stages lie: `linear` keeps neighbours together, `loop` goes round, `v` goes there and back.

4 ranks, 2 stages a rank     linear  0 0 1 1 2 2 3 3     loop  0 1 2 3 0 1 2 3     v  0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SHAPES", "place", "shapes_of"]

SHAPES = ("linear", "loop", "v")


def place(shape: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage; with one stage a rank all shapes are alike."""
    if shape == "linear":
        return tuple(rank for rank in range(ranks) for _ in range(stages_per_rank))
    there = tuple(range(ranks))
    legs = [
        there if shape == "loop" or leg % 2 == 0 else there[::-1] for leg in range(stages_per_rank)
    ]
    return tuple(rank for leg in legs for rank in leg)


def shapes_of(placement: Sequence[int]) -> tuple[str, ...]:
    """The shapes that a placement has, whatever the ranks are called."""
    names = {rank: index for index, rank in enumerate(dict.fromkeys(placement))}
    ranks, rest = len(names), len(placement) % len(names)
    called = tuple(names[rank] for rank in placement)
    return tuple(
        s for s in SHAPES if not rest and called == place(s, ranks, len(placement) // ranks)
    )
