"""Policies for list scheduling: a few that differ in kind, and as many more as there is time for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipecompile.schedule.instance import BACKWARD, FORWARD, ScheduleInstance
from pipecompile.schedule.list_scheduling import Priorities

__all__ = ["random_priorities", "systematic_priorities", "thrifty_priorities", "varied_priorities"]

_PREFER = ("turns", "forward", "backward")
_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)


def thrifty_priorities(instance: ScheduleInstance) -> Iterator[Priorities]:
    """The few that come near the bound by themselves where there are many microbatches, the best first."""
    behind = _behind(instance)
    for patience, quarters in product((0.75, 1.0), (7, 6, 8, 5)):
        depth = tuple(-(-quarters * ahead // 4) for ahead in behind)
        yield Priorities(
            depth, "turns", patience=patience, waits_within_slack=True, yields_to_backward=True
        )


def systematic_priorities(instance: ScheduleInstance) -> Iterator[Priorities]:
    """Every kind of policy at every natural depth, the simplest first."""
    problem = instance.problem
    several = ((True, False), (True, True), (False, False), (False, True))
    deep = several if problem.stages > problem.ranks else several[:1]
    for patience, depth, yields_to_backward, prefer in product(
        (0.0, 0.5, 1.0), _depths(instance), (True, False), _PREFER
    ):
        yield Priorities(depth, prefer, patience=patience, yields_to_backward=yields_to_backward)
    for depth, (forward, backward), prefer in product(_depths(instance), deep[1:], _PREFER):
        yield Priorities(depth, prefer, forward, backward)


def _depths(instance: ScheduleInstance) -> Iterator[tuple[int, ...]]:
    """Twice what 1F1B has, as ZB-H2, and less; what round trips call for; 1F1B's; and as deep as memory allows."""
    problem = instance.problem
    behind = _behind(instance)
    yield tuple(2 * ahead for ahead in behind)
    yield tuple(-(-3 * ahead // 2) for ahead in behind)
    yield tuple(_round_trips(instance))
    yield tuple(behind)
    yield tuple(2 * ahead - 1 for ahead in behind)
    yield (problem.microbatches,) * problem.stages


def _behind(instance: ScheduleInstance) -> list[int]:
    """Per stage how many there are from it to the end."""
    return list(range(instance.problem.stages, 0, -1))


def _round_trips(instance: ScheduleInstance) -> Iterator[int]:
    """How many microbatches the slowest rank performs while one goes from a stage to the end and back."""
    forward, backward = instance.task_ns[FORWARD], instance.task_ns[BACKWARD]
    problem = instance.problem
    loads = [
        sum(sum(lane[s] for lane in instance.task_ns) for s in stages)
        for stages in instance.stages_by_rank
    ]
    for stage in range(problem.stages):
        hops = sum(problem.forward_transfer_ns[stage:]) + sum(problem.backward_transfer_ns[stage:])
        trip = sum(forward[stage:]) + sum(backward[stage:]) + hops
        yield 1 + -(-trip // max(*loads, 1))


def random_priorities(instance: ScheduleInstance, source: random.Random) -> Priorities:
    """Any policy whose depths fall evenly from the first stage to the last."""
    slope, least = source.uniform(0.3, 2.2), source.uniform(0, 5)
    stages = instance.problem.stages
    return Priorities(
        tuple(max(1, round(slope * (stages - stage) + least)) for stage in range(stages)),
        source.choice(_PREFER),
        source.random() < 0.5,
        source.random() < 0.5,
        source.choice(_PATIENCE),
        source.random() < 0.5,
    )


def varied_priorities(priorities: Priorities, source: random.Random) -> Priorities:
    """One that is much like `policy`."""
    steps = (
        source.choice((-2, -1, 0, 0, 1, 2)) if source.random() < 0.4 else 0
        for _ in priorities.depth
    )
    depth = tuple(max(1, old + step) for old, step in zip(priorities.depth, steps, strict=True))
    changed = replace(priorities, depth=depth)
    if source.random() < 0.2:
        changed = replace(changed, prefer=source.choice(_PREFER))
    if source.random() < 0.2:
        changed = replace(changed, patience=source.choice(_PATIENCE))
    if source.random() < 0.15:
        changed = replace(changed, deep_forward_first=not priorities.deep_forward_first)
    return (
        replace(changed, deep_backward_first=not priorities.deep_backward_first)
        if source.random() < 0.15
        else changed
    )
