"""How the named schedules are written down: for each rank, whose turn it is.

A turn is a stage and a kind of action. The first turn of a stage's forwards is that of microbatch 0, the next that of
microbatch 1, and so for its backwards: so every stage takes the microbatches in ascending order by construction, and
sums its gradients in the order of the unsplit run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pipecompile.ir.schedule import Action, Kind

__all__ = ["Layout", "Task", "backwards", "forwards", "layout_of", "numbered"]

Task = tuple[int, Kind]
Layout = tuple[tuple[int, ...], ...]
"""For each rank the stages that it holds, ascending; ranks in the order in which a microbatch first meets them."""


def layout_of(placement: Sequence[int]) -> Layout:
    """The layout of `placement[stage] = rank`, whatever its ranks are called."""
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(placement):
        held.setdefault(rank, []).append(stage)
    return tuple(map(tuple, held.values()))


def forwards(stages: Sequence[int]) -> Iterator[Task]:
    """The forwards of neighbouring stages, in the order in which a microbatch meets them."""
    return ((stage, Kind.FORWARD) for stage in stages)


def backwards(stages: Sequence[int]) -> Iterator[Task]:
    """Their backwards, from the last to the first."""
    return ((stage, Kind.BACKWARD) for stage in reversed(stages))


def numbered(turns: Iterable[Task], microbatches: int) -> tuple[Action, ...]:
    """The actions of one rank; a turn that finds no microbatch left is skipped, and B counts as both its halves.

    Skipping is safe: microbatches wait for each other in no other way than in the order of a rank, so a schedule that
    comes to its end does so without some of them, too.
    """
    taken: Counter[Task] = Counter()
    row = []
    for stage, kind in turns:
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if kind is Kind.BACKWARD else (kind,)
        microbatch = taken[stage, halves[0]]
        for half in halves:
            taken[stage, half] += 1
        if microbatch < microbatches:
            row.append(Action(stage, kind, microbatch))
    return tuple(row)
