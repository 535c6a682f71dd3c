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

__all__ = ["Layout", "Task", "backwards", "forwards", "layout_of", "numbered"]

Task = tuple[int, Kind]
Layout = tuple[tuple[int, ...], ...]
"""For each rank its stages, ascending. Ranks are in the order in which a microbatch meets them."""


def layout_of(placement: Sequence[int]) -> Layout:
    """Return the layout of a placement, whatever numbers its ranks have."""
    stages_by_rank: dict[int, list[int]] = {}
    for stage, rank in enumerate(placement):
        stages_by_rank.setdefault(rank, []).append(stage)
    return tuple(map(tuple, stages_by_rank.values()))


def forwards(stages: Sequence[int]) -> Iterator[Task]:
    """Return the forwards of neighbouring stages, in the order in which a microbatch meets them."""
    return ((stage, Kind.FORWARD) for stage in stages)


def backwards(stages: Sequence[int]) -> Iterator[Task]:
    """Return the backwards of neighbouring stages, from the last stage to the first."""
    return ((stage, Kind.BACKWARD) for stage in reversed(stages))


def numbered(tasks: Iterable[Task], microbatches: int) -> tuple[Action, ...]:
    """Return the actions of one rank's tasks; tasks for which no microbatch is left are skipped.

    A full backward counts as both halves: after 0B the next 0I is for microbatch 1.

    Skipping is safe. The only way in which one microbatch waits for another is the order of a
    rank, so a schedule without deadlocks stays free of them without some of its microbatches.
    """
    used: Counter[Task] = Counter()
    actions = []
    for stage, kind in tasks:
        # DualPipeV has full and split backwards of one stage.
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if kind is Kind.BACKWARD else (kind,)
        microbatch = used[stage, halves[0]]
        for half in halves:
            used[stage, half] += 1
        if microbatch < microbatches:
            actions.append(Action(stage, kind, microbatch))
    return tuple(actions)
