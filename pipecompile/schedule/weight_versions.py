"""Versions of the weights in schedules without a common optimizer step: 0 to begin with, and one more by each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipecompile.ir.schedule import (
    BACKWARDS,
    COMPUTE,
    WEIGHT_GRADIENT_KINDS,
    Action,
    Kind,
    Schedule,
)

__all__ = ["without_versions", "version_violations"]


def without_versions(schedule: Schedule) -> Schedule:
    """The schedule without the versions of its actions."""
    if all(action.version is None for _, action in schedule):
        return schedule
    rows = [[action._replace(version=None) for action in row] for row in schedule.rows]
    return Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )


def version_violations(schedule: Schedule) -> Iterator[str]:
    """Every violation of the rule that `schedule.weight_versions` names, one line each."""
    if schedule.weight_versions == "synchronous":
        named = ((rank, action) for rank, action in schedule if action.version is not None)
        return (
            f"rank {rank}: {action} names a version, but all of a step see the same weights"
            for rank, action in named
        )
    return (
        line
        for check in (_made, _own, _newest, _buffered, _same, _stepped)
        for line in check(schedule)
    )


def _made(schedule: Schedule) -> Iterator[str]:
    """A version is used once a step of its stage has made it; each step makes the next one."""
    newest: dict[int, int] = defaultdict(int)
    for rank, action in schedule:
        stage, kind, _, version = action
        if kind is Kind.STEP:
            newest[stage] += 1
            if version not in (None, newest[stage]):
                yield f"rank {rank}: {action} makes version {version}, but the next one is {newest[stage]}"
        elif kind in COMPUTE and version is None:
            yield f"rank {rank}: {action} names no version of the weights, such as {action}@0"
        elif kind is Kind.FORWARD and version is not None and version > newest[stage]:
            yield f"rank {rank}: {action} uses version {version} before a step of stage {stage} has made it"


def _own(schedule: Schedule) -> Iterator[str]:
    """All of a microbatch's actions in a stage use the version of its forward."""
    for rank, row in enumerate(schedule.compute):
        forwards = _forwards(row)
        for action in row:
            forward = forwards.get((action.stage, action.microbatch), action)
            if action.version != forward.version:
                yield f"rank {rank}: {action} uses another version than its forward {forward}"


def _newest(schedule: Schedule) -> Iterator[str]:
    """With stashed weights a forward takes the newest of its stage; with vertical sync the first stage does."""
    if schedule.weight_versions == "double-buffered":
        return
    made: dict[int, int] = defaultdict(int)
    for rank, action in schedule:
        made[action.stage] += action.kind is Kind.STEP
        version = made[action.stage] if action.version is None else action.version
        bound = schedule.weight_versions == "stashed" or action.stage == 0
        if bound and action.kind is Kind.FORWARD and version < made[action.stage]:
            yield f"rank {rank}: {action} does not use version {made[action.stage]}, the newest of its stage"


def _buffered(schedule: Schedule) -> Iterator[str]:
    """With two buffers a microbatch of update u sees the weights that update u − 1 began with."""
    if schedule.weight_versions != "double-buffered":
        return
    for rank, row in enumerate(schedule.rows):
        updates, forwards = defaultdict[int, int](int), _forwards(row)
        for action in row:
            updates[action.stage] += action.kind is Kind.STEP
            forward = forwards.get((action.stage, action.microbatch))
            wanted = max(0, updates[action.stage] - 1)
            if (
                action.kind in BACKWARDS
                and forward is not None
                and forward.version not in (None, wanted)
            ):
                yield f"rank {rank}: {forward} is part of update {updates[action.stage]}, which uses version {wanted}"


def _stepped(schedule: Schedule) -> Iterator[str]:
    """Every gradient is used by a step; unless weights are double-buffered, by one of its own."""
    for rank, row in enumerate(schedule.rows):
        waiting: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind is Kind.STEP:
                waiting[action.stage].clear()
            elif action.kind in WEIGHT_GRADIENT_KINDS:
                waiting[action.stage].append(action)
                if len(waiting[action.stage]) > 1 and schedule.weight_versions != "double-buffered":
                    yield f"rank {rank}: no step comes between {waiting[action.stage][-2]} and {action}"
        yield from (
            f"rank {rank}: no step comes after {actions[-1]}"
            for actions in waiting.values()
            if actions
        )


def _same(schedule: Schedule) -> Iterator[str]:
    """With vertical sync a microbatch sees one version on all stages."""
    if schedule.weight_versions != "vertical-sync":
        return
    forwards = {key: forward for row in schedule.rows for key, forward in _forwards(row).items()}
    for (stage, microbatch), forward in sorted(forwards.items()):
        first = forwards.get((0, microbatch), forward)
        if forward.version != first.version:
            ranks = schedule.placement[stage], schedule.placement[0]
            yield f"rank {ranks[0]}: {forward} uses another version than {first} on rank {ranks[1]}"


def _forwards(row: Sequence[Action]) -> dict[tuple[int, int | None], Action]:
    return {
        (action.stage, action.microbatch): action for action in row if action.kind is Kind.FORWARD
    }
