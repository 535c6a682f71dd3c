"""Priorities for list scheduling: a few that differ in kind, and as many more as there is time for.

`_depths` says how deep stages may run ahead; the depths of 1F1B for 4 stages are 4 3 2 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipecompile.schedule.instance import BACKWARD, FORWARD, ScheduleInstance
from pipecompile.schedule.list_scheduling import Priorities

__all__ = [
    "random_priorities",
    "systematic_priorities",
    "thrifty_priorities",
    "varied_priorities",
]

_PREFER = ("turns", "forward", "backward")
_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)


def thrifty_priorities(instance: ScheduleInstance) -> Iterator[Priorities]:
    """Yield the few that come near the bound by themselves with many microbatches, best first."""
    # Depths of 7/4, 6/4, 8/4 and 5/4 of those of 1F1B, rounded up.
    for patience, quarters in product((0.75, 1.0), (7, 6, 8, 5)):
        depth = tuple(-(-quarters * stages // 4) for stages in _stages_to_the_end(instance))
        yield Priorities(
            depth, "turns", patience=patience, waits_within_slack=True, yields_to_backward=True
        )


def systematic_priorities(instance: ScheduleInstance) -> Iterator[Priorities]:
    """Yield every kind of priorities at every natural depth, the simplest first."""
    problem = instance.problem
    for patience, depth, yields, prefer in product(
        (0.0, 0.5, 1.0), _depths(instance), (True, False), _PREFER
    ):
        yield Priorities(depth, prefer, patience=patience, yields_to_backward=yields)
    if problem.stages <= problem.ranks:
        return  # with one stage on each rank there is none to prefer
    for depth, (forward, backward), prefer in product(
        _depths(instance), ((True, True), (False, False), (False, True)), _PREFER
    ):
        yield Priorities(depth, prefer, forward, backward)


def _depths(instance: ScheduleInstance) -> Iterator[tuple[int, ...]]:
    """Yield for each stage how many microbatches it may have in flight, in several ways."""
    problem, ahead = instance.problem, _stages_to_the_end(instance)
    yield tuple(2 * stages for stages in ahead)  # about those of ZB-H2
    yield tuple(-(-3 * stages // 2) for stages in ahead)
    yield tuple(_round_trips(instance))
    yield tuple(ahead)  # those of 1F1B
    yield tuple(2 * stages - 1 for stages in ahead)
    yield (problem.microbatches,) * problem.stages  # as many as memory allows


def _stages_to_the_end(instance: ScheduleInstance) -> list[int]:
    """Return for each stage how many there are from it to the last one, itself included."""
    return list(range(instance.problem.stages, 0, -1))


def _round_trips(instance: ScheduleInstance) -> Iterator[int]:
    """Yield for each stage how many microbatches keep the pipeline busy.

    That is how many the slowest rank performs while one goes from the stage to the end and back.
    """
    forward, backward = instance.task_ns[FORWARD], instance.task_ns[BACKWARD]
    problem = instance.problem
    loads = [
        sum(times[stage] for times in instance.task_ns for stage in stages)
        for stages in instance.stages_by_rank
    ]
    for stage in range(problem.stages):
        trip_ns = sum(forward[stage:]) + sum(backward[stage:])
        trip_ns += sum(problem.forward_transfer_ns[stage:])
        trip_ns += sum(problem.backward_transfer_ns[stage:])
        yield 1 + -(-trip_ns // max(*loads, 1))


def random_priorities(instance: ScheduleInstance, source: random.Random) -> Priorities:
    """Return any priorities whose depths fall evenly from the first stage to the last."""
    slope, least = source.uniform(0.3, 2.2), source.uniform(0, 5)
    stages = instance.problem.stages
    return Priorities(
        depth=tuple(max(1, round(slope * (stages - stage) + least)) for stage in range(stages)),
        prefer=source.choice(_PREFER),
        deep_forward_first=source.random() < 0.5,
        deep_backward_first=source.random() < 0.5,
        patience=source.choice(_PATIENCE),
        yields_to_backward=source.random() < 0.5,
    )


def varied_priorities(priorities: Priorities, source: random.Random) -> Priorities:
    """Return priorities that differ little from these."""
    depth = []
    for before in priorities.depth:
        # Most depths stay as they are.
        step = source.choice((-2, -1, 0, 0, 1, 2)) if source.random() < 0.4 else 0
        depth.append(max(1, before + step))
    varied = replace(priorities, depth=tuple(depth))
    if source.random() < 0.2:
        varied = replace(varied, prefer=source.choice(_PREFER))
    if source.random() < 0.2:
        varied = replace(varied, patience=source.choice(_PATIENCE))
    if source.random() < 0.15:
        varied = replace(varied, deep_forward_first=not priorities.deep_forward_first)
    if source.random() < 0.15:
        varied = replace(varied, deep_backward_first=not priorities.deep_backward_first)
    return varied
