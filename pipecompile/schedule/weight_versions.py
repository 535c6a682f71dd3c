"""Checks the weight versions of asynchronous schedules.

The weights of a stage begin with version 0, and each optimizer step of the stage produces the next
version. `ir.schedule.Schedule` says which version each rule requires.
"""

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
from pipecompile.ir.stage_ranks import has_stage_replicas

__all__ = ["version_violations", "without_versions"]


def without_versions(schedule: Schedule) -> Schedule:
    """Return the schedule without the versions of its actions."""
    if all(action.version is None for _, action in schedule):
        return schedule
    rows = [[action._replace(version=None) for action in row] for row in schedule.rows]
    return Schedule.of(
        schedule.name, schedule.microbatches, schedule.placement, rows, schedule.weight_versions
    )


def version_violations(schedule: Schedule) -> Iterator[str]:
    """Yield every violation of the rule `schedule.weight_versions`, one line each."""
    if schedule.weight_versions == "synchronous":
        for rank, action in schedule:
            if action.version is not None:
                yield (
                    f"rank {rank}: {action} names a version, but all of a step see the same weights"
                )
        return
    yield from _versions_before_their_step(schedule)
    yield from _changes_within_a_stage(schedule)
    yield from _stale_versions(schedule)
    yield from _wrong_buffers(schedule)
    yield from _differences_between_stages(schedule)
    yield from _unused_gradients(schedule)


def _versions_before_their_step(schedule: Schedule) -> Iterator[str]:
    """A version may be used once a step of its stage has produced it, and steps count up."""
    newest: dict[tuple[int, int], int] = defaultdict(int)  # replicas of a stage make all versions
    for rank, action in schedule:
        stage, kind, _, version = action
        if kind is Kind.STEP:
            newest[rank, stage] += 1
            if version not in (None, newest[rank, stage]):
                yield (
                    f"rank {rank}: {action} makes version {version}, "
                    f"but the next one is {newest[rank, stage]}"
                )
        elif kind in COMPUTE and version is None:
            yield f"rank {rank}: {action} names no version of the weights, such as {action}@0"
        elif kind is Kind.FORWARD and version is not None and version > newest[rank, stage]:
            yield (
                f"rank {rank}: {action} uses version {version} "
                f"before a step of stage {stage} has made it"
            )


def _changes_within_a_stage(schedule: Schedule) -> Iterator[str]:
    """All of a microbatch's actions in a stage must use the version of its forward."""
    for rank, row in enumerate(schedule.compute):
        forwards = _forwards(row)
        for action in row:
            forward = forwards.get((action.stage, action.microbatch), action)
            if action.version != forward.version:
                yield f"rank {rank}: {action} uses another version than its forward {forward}"


def _stale_versions(schedule: Schedule) -> Iterator[str]:
    """With stashed weights every stage must use its newest version in forwards.

    With vertical sync only the first stage must.
    """
    if schedule.weight_versions == "double-buffered":
        return
    made: dict[tuple[int, int], int] = defaultdict(int)
    for rank, action in schedule:
        made[rank, action.stage] += action.kind is Kind.STEP
        newest = made[rank, action.stage]
        # Forwards that name no version are reported by another rule.
        version = newest if action.version is None else action.version
        # An older one would train as well, but with more delay than the rule promises.
        must_be_newest = schedule.weight_versions == "stashed" or action.stage == 0
        if must_be_newest and action.kind is Kind.FORWARD and version < newest:
            yield f"rank {rank}: {action} does not use version {newest}, the newest of its stage"


def _wrong_buffers(schedule: Schedule) -> Iterator[str]:
    """With two buffers a microbatch of update u must use the weights that update u − 1 began with.

    Its update is the number of steps before its backward.
    """
    if schedule.weight_versions != "double-buffered":
        return
    for rank, row in enumerate(schedule.rows):
        updates, forwards = defaultdict[int, int](int), _forwards(row)
        for action in row:
            updates[action.stage] += action.kind is Kind.STEP
            forward = forwards.get((action.stage, action.microbatch))
            if action.kind not in BACKWARDS or forward is None:
                continue
            # The gradient of update 2 is that of version 1: W(3) = W(2) − ν ∇f(W(1)).
            required = max(0, updates[action.stage] - 1)
            if forward.version not in (None, required):
                yield (
                    f"rank {rank}: {forward} is part of update {updates[action.stage]}, "
                    f"which uses version {required}"
                )


def _unused_gradients(schedule: Schedule) -> Iterator[str]:
    """A step must follow every gradient; unless weights are double-buffered or stages have
    replicas, one of its own.
    """
    may_share_a_step = schedule.weight_versions == "double-buffered"
    may_share_a_step |= has_stage_replicas(schedule.placement)
    for rank, row in enumerate(schedule.rows):
        unused: dict[int, list[Action]] = defaultdict(list)  # by stage, since its last step
        for action in row:
            if action.kind is Kind.STEP:
                unused[action.stage].clear()
            elif action.kind in WEIGHT_GRADIENT_KINDS:
                gradients = unused[action.stage]
                gradients.append(action)
                if len(gradients) > 1 and not may_share_a_step:
                    yield f"rank {rank}: no step comes between {gradients[-2]} and {action}"
        for gradients in unused.values():
            if gradients:
                yield f"rank {rank}: no step comes after {gradients[-1]}"


def _differences_between_stages(schedule: Schedule) -> Iterator[str]:
    """With vertical sync a microbatch must see one version on all stages."""
    if schedule.weight_versions != "vertical-sync":
        return
    forwards = {key: forward for row in schedule.rows for key, forward in _forwards(row).items()}
    for (stage, microbatch), forward in sorted(forwards.items()):
        first = forwards.get((0, microbatch), forward)
        if forward.version != first.version:
            rank, first_rank = schedule.placement[stage], schedule.placement[0]
            yield (f"rank {rank}: {forward} uses another version than {first} on rank {first_rank}")


def _forwards(row: Sequence[Action]) -> dict[tuple[int, int | None], Action]:
    return {
        (action.stage, action.microbatch): action for action in row if action.kind is Kind.FORWARD
    }
