"""Which ranks run a stage: one, or several replicas that take its microbatches in turns.

A placement has the first rank of each stage. Ranks between it and the first one of the next stage
are replicas of it, as in PipeDream's 2-1 (Harlap et al., arXiv 1806.03377, section 3.2):

    placement 0 2        stage 0 on ranks 0 and 1, stage 1 on rank 2
                         microbatch m of stage 0 on rank m mod 2

So the last stage, whose rank has the losses, has no replicas. Nor have stages that share ranks: a
placement without gaps, or one that does not ascend, has one rank for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

__all__ = ["has_stage_replicas", "placement_of", "ranks_text", "stage_ranks", "stages_on"]


def placement_of(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the placement of stages with so many replicas; of the last one it has one.

    >>> placement_of([2, 3, 1])
    (0, 2, 5)
    """
    return tuple(accumulate(replicas[:-1], initial=0))


def stage_ranks(placement: Sequence[int]) -> tuple[range, ...]:
    """Return the ranks of each stage.

    >>> stage_ranks([0, 2])
    (range(0, 2), range(2, 3))
    """
    return _stage_ranks(tuple(placement))


# A schedule is asked for the rank of each of its actions.
@lru_cache(maxsize=64)
def _stage_ranks(placement: tuple[int, ...]) -> tuple[range, ...]:
    # 0 2 3 has gaps where stage 0 has replicas. 0 1 0 1 (a loop) does not ascend, and 0 1 1 0 (a
    # V) neither: their stages have one rank each, which several share.
    if all(left < right for left, right in pairwise(placement)):
        return tuple(map(range, placement, (*placement[1:], placement[-1] + 1)))
    return tuple(range(rank, rank + 1) for rank in placement)


def stages_on(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages of a rank."""
    return tuple(stage for stage, ranks in enumerate(stage_ranks(placement)) if rank in ranks)


def has_stage_replicas(placement: Sequence[int]) -> bool:
    """Return whether a stage has several ranks."""
    return any(len(ranks) > 1 for ranks in stage_ranks(placement))


def ranks_text(ranks: range) -> str:
    """Return the ranks of a stage for people.

    >>> ranks_text(range(0, 7))
    '0-6'
    """
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
