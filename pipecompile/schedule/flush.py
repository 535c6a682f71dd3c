"""Schedules of full backwards that empty the pipeline at the end of every step.

In the drawings every action takes one slot and a dot is a bubble. With one stage on each rank F1 is
the forward of microbatch 1; else 3F1 is that of stage 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipecompile.schedule.tasks import Layout, Task, backwards, forwards

__all__ = ["forward_only", "gpipe", "interleaved", "one_f_one_b"]


def forward_only(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield every microbatch once through every stage, as an evaluation needs it.

    rank 0   F0 F1 F2 .  .
    rank 1   .  F0 F1 F2 .
    rank 2   .  .  F0 F1 F2
    """
    # Stages of one run follow each other without a message, so a microbatch
    # takes them at once: 0F0 1F0 0F1 1F1 where stages 0 and 1 share a rank.
    # Were 0F1 before 1F0, the next rank would only wait longer.
    for run in _runs(layout[rank]):
        for _ in range(microbatches):
            yield from forwards(run)


def gpipe(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield all forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965, figure 2c).

    rank 0   F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1   .  F0 F1 F2 .  .  B0 B1 B2 .
    rank 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    On a loop this is breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953,
    section 4), called looped-bfs here: a rank takes all microbatches through one of its stages
    before it begins its next one.

    rank 0   0F0 0F1 0F2 3F0 3F1 3F2 .   .   .   .   3B0 3B1 3B2 0B0 0B1 0B2
    rank 1   .   1F0 1F1 1F2 4F0 4F1 4F2 .   .   4B0 4B1 4B2 1B0 1B1 1B2 .
    rank 2   .   .   2F0 2F1 2F2 5F0 5F1 5F2 5B0 5B1 5B2 2B0 2B1 2B2 .   .
    """
    yield from forward_only(layout, rank, microbatches)
    for run in reversed(_runs(layout[rank])):
        for _ in range(microbatches):
            yield from backwards(run)


def one_f_one_b(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield one forward, one backward.

    (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, figure 3.)

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Replicas of a stage take its microbatches in turns (PipeDream's 1F1B-RR, arXiv 1806.03377,
    section 3.2). Each begins with as many forwards as ranks from its stage on come to one replica:
    here 3 / 2, rounded up.

    rank 0   F0 F2 .  B0 .  .  .  B2 .  .
    rank 1   F1 F3 .  .  .  B1 .  .  .  B3
    rank 2   .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    # Rank 0 of 3, without replicas:  F0 F1 F2 │ B0 F3 B1 │ B2 B3. The gradient of
    # microbatch 0 comes back behind the forwards of all ranks from this one on, of
    # which each has a microbatch by then. More forwards would only hold memory.
    replicas, behind = layout.count(layout[rank]), len(layout) - layout.index(layout[rank])
    for _ in range(-(-behind // replicas)):
        yield from forwards(layout[rank])
    # Tasks beyond the last microbatch are dropped by `tasks.numbered`.
    for _ in range(microbatches):
        yield from backwards(layout[rank])
        yield from forwards(layout[rank])


def interleaved(layout: Layout, rank: int, microbatches: int) -> Iterator[Task]:
    """Yield 1F1B over a loop of stages.

    (Narayanan et al., arXiv 2104.04473, section 2.2 and figure 4; Megatron-LM.)

    rank 0   0F0 0F1 0F2 3F0 3F1 3F2 .   .   3B0 .   3B1 .   3B2 0B0 0B1 0B2
    rank 1   .   1F0 1F1 1F2 4F0 4F1 4F2 4B0 .   4B1 .   4B2 1B0 1B1 1B2 .
    rank 2   .   .   2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2 .   .

    A group is as many microbatches as there are ranks; a rank takes a group through one of its
    stages after the other. The forwards lead the backwards by one group for each further stage of
    the rank, and by two actions for each rank that follows. With one stage on each rank this is
    1F1B. If the number of ranks does not divide the number of microbatches, the groups are longer
    and the last one may be smaller.
    """
    stages, ranks = layout[rank], len(layout)
    if len(stages) == 1:
        yield from one_f_one_b(layout, rank, microbatches)
        return
    # 11 microbatches on 4 ranks are two groups of size 6, of which the second one lacks one.
    groups = max(1, microbatches // ranks)
    size = max(ranks, -(-microbatches // groups))
    # Rank 0 of 2 with stages 0 and 2, groups of 2, lead 4:
    #     0F0 0F1 2F0 2F1 │ 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 │ 2B2 2B3 0B2 0B3
    # The last stage of the rank comes up after a group for each stage before it. Each rank
    # behind it adds two to the way of a microbatch, its own forward and its own backward.
    lead = 2 * (ranks - 1 - rank) + (len(stages) - 1) * size
    # One group after the other; within a group one stage after the other.
    forward_tasks = [task for task in forwards(stages) for _ in range(size)] * groups
    backward_tasks = [task for task in backwards(stages) for _ in range(size)] * groups
    yield from forward_tasks[:lead]
    # The slice is empty when no forwards are left.
    for index, task in enumerate(backward_tasks, start=lead):
        yield from forward_tasks[index : index + 1]
        yield task


def _runs(stages: Sequence[int]) -> list[Sequence[int]]:
    """Return the runs of neighbouring stages of a rank: 0 1 4 5 gives 0 1 and 4 5."""
    gaps = [index + 1 for index, (left, right) in enumerate(pairwise(stages)) if right != left + 1]
    cuts = [0, *gaps, len(stages)]
    return [stages[start:end] for start, end in pairwise(cuts)]
