"""Where stages lie.

4 ranks with 2 stages each:

    linear   0 0 1 1 2 2 3 3     neighbouring stages share a rank
    loop     0 1 2 3 0 1 2 3     around and around
    v        0 1 2 3 3 2 1 0     there and back
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SHAPES", "place", "shapes_of"]

SHAPES = ("linear", "loop", "v")


def place(shape: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage; with one stage on each rank all shapes are the same."""
    if shape == "linear":
        return tuple(rank for rank in range(ranks) for _ in range(stages_per_rank))
    placement: list[int] = []
    # A loop begins each leg at rank 0, so that the last rank sends to the first one. A V turns
    # round instead: stages r and 2 ranks − 1 − r share a rank, and at the turn there is no message.
    for leg in range(stages_per_rank):
        is_way_back = shape == "v" and leg % 2 == 1
        placement += reversed(range(ranks)) if is_way_back else range(ranks)
    return tuple(placement)


def shapes_of(placement: Sequence[int]) -> tuple[str, ...]:
    """Return the shapes that a placement has, whatever numbers its ranks have."""
    # Ranks are renumbered in the order in which a microbatch meets them: 2 0 0 2 becomes 0 1 1 0.
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(placement))}
    stages_per_rank, rest = divmod(len(placement), len(numbers))
    if rest:
        return ()
    renumbered = tuple(numbers[rank] for rank in placement)
    return tuple(
        shape for shape in SHAPES if renumbered == place(shape, len(numbers), stages_per_rank)
    )
