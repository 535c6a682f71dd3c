"""How the generators of named schedules write down an order: as the tasks of each rank.

A task is a stage and a kind of action. The first forward task of a stage is for microbatch 0, the
next one for microbatch 1, and so on; likewise for its backward tasks. Every stage therefore takes
the microbatches in ascending order by construction, and sums its gradients in the order of the
unsplit run.

    tasks     0F 0F 0B 0F 0B 0B
    actions   0F0 0F1 0B0 0F2 0B1 0B2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pipecompile.ir.schedule import Action, Kind
from pipecompile.ir.stage_ranks import stage_ranks

__all__ = ["Layout", "Task", "backwards", "forwards", "layout_of", "numbered", "own_microbatches"]

Task = tuple[int, Kind]
Layout = tuple[tuple[int, ...], ...]
"""For each rank its stages, ascending. Ranks are in the order in which a microbatch meets them;
replicas of a stage follow each other.
"""


def layout_of(placement: Sequence[int]) -> Layout:
    """Return the layout of a placement, whatever numbers its ranks have."""
    stages_by_rank: dict[int, list[int]] = {}
    for stage, ranks in enumerate(stage_ranks(placement)):
        for rank in ranks:
            stages_by_rank.setdefault(rank, []).append(stage)
    return tuple(map(tuple, stages_by_rank.values()))


def forwards(stages: Sequence[int]) -> Iterator[Task]:
    """Return the forwards of neighbouring stages, in the order in which a microbatch meets them."""
    return ((stage, Kind.FORWARD) for stage in stages)


def backwards(stages: Sequence[int]) -> Iterator[Task]:
    """Return the backwards of neighbouring stages, from the last stage to the first."""
    return ((stage, Kind.BACKWARD) for stage in reversed(stages))


def own_microbatches(layout: Layout, rank: int, microbatches: int) -> range:
    """Return the microbatches of a rank: every r-th one if its stage has r replicas."""
    # The second of 2 replicas has 1 3 5 … Replicas lie side by side in a layout and
    # have equal stages, so the first rank with these stages is the first replica.
    return range(rank - layout.index(layout[rank]), microbatches, layout.count(layout[rank]))


def numbered(tasks: Iterable[Task], microbatches: range) -> tuple[Action, ...]:
    """Return the actions of one rank's tasks on its `microbatches`; tasks for which none is left
    are skipped.

    A full backward counts as both halves: after 0B the next 0I is for microbatch 1.

    Skipping is safe. The only way in which one microbatch waits for another is the order of a
    rank, so a schedule without deadlocks stays free of them without some of its microbatches.
    """
    used: Counter[Task] = Counter()
    actions = []
    for stage, kind in tasks:
        # DualPipeV has full and split backwards of one stage.
        # After 3B1 the next 3I must not be 3I0 or 3I1 once more: a full backward uses both numbers.
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if kind is Kind.BACKWARD else (kind,)
        microbatch = used[stage, halves[0]]
        for half in halves:
            used[stage, half] += 1
        if microbatch < len(microbatches):
            actions.append(Action(stage, kind, microbatches[microbatch]))
    return tuple(actions)
