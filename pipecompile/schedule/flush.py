"""Schedules of whole backwards, with the pipeline empty at the end of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipecompile.schedule.tasks import Layout, Task, backwards, forwards

__all__ = ["forward_only", "gpipe", "interleaved", "one_f_one_b"]


def forward_only(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Every microbatch once through every stage, as an evaluation needs it."""
    for run in _runs(layout[rank]):
        for _ in range(microbatches):
            yield from forwards(run)


def gpipe(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965, figure 2c).

    rank 0   F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1   .  F0 F1 F2 .  .  B0 B1 B2 .
    rank 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    On a loop this is breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953, section 4): a rank takes all
    microbatches through one stage before it begins its next one.
    """
    yield from forward_only(layout, rank, microbatches)
    for run in reversed(_runs(layout[rank])):
        for _ in range(microbatches):
            yield from backwards(run)


def one_f_one_b(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """One forward, one backward (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, figure 3).

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    for _ in range(len(layout) - rank):
        yield from forwards(layout[rank])
    for _ in range(microbatches):
        yield from backwards(layout[rank])
        yield from forwards(layout[rank])


def interleaved(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """1F1B over a loop of stages (Narayanan et al., arXiv 2104.04473, section 2.2 and figure 4; Megatron-LM).

    Groups of as many microbatches as there are ranks take one stage of the rank after the other. The forwards lead by
    a group for each further stage of the rank and by two for each rank that follows. With one stage a rank it is
    1F1B. Where the ranks do not divide the microbatches, the groups are longer and the last one may lack some.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .
    """
    stages, ranks = layout[rank], len(layout)
    if len(stages) == 1:
        yield from one_f_one_b(layout, rank, microbatches)
        return
    groups = max(1, microbatches // ranks)
    size = max(ranks, -(-microbatches // groups))
    lead = 2 * (ranks - 1 - rank) + (len(stages) - 1) * size
    there = [turn for turn in forwards(stages) for _ in range(size)] * groups
    back = [turn for turn in backwards(stages) for _ in range(size)] * groups
    yield from there[:lead]
    for index, turn in enumerate(back):
        yield from there[lead + index : lead + index + 1]
        yield turn


def _runs(stages: Sequence[int]) -> list[Sequence[int]]:
    """The stages of a rank, cut where the next stage of the model lies elsewhere: 0 1 4 5 gives 0 1 and 4 5."""
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(stages)) if b != a + 1), len(stages)]
    return [stages[start:end] for start, end in pairwise(cuts)]
