"""The order that takes one microbatch after the other, which needs the least memory of all."""

from __future__ import annotations

from itertools import accumulate

from pipecompile.schedule.instance import BACKWARD, FORWARD, Rows, ScheduleInstance

__all__ = ["serial_order", "single_microbatch_peak"]


def single_microbatch_peak(instance: ScheduleInstance, rank: int) -> int:
    """Return the most bytes that one microbatch alone comes to hold on a rank, in any order.

    While a stage goes back, all other stages of the rank may be held, except those whose
    backwards must come before.
    """
    kept = instance.task_bytes[FORWARD]
    stages, reach = instance.stages_by_rank[rank], instance.gradient_reach
    peaks = []
    for stage in stages:
        # Stages 0 and 3 of a V on rank 0, 4 bytes each: while stage 3
        # goes back, stage 0 is held too, 8 in all. While stage 0 goes
        # back, stage 3 is done, since its gradient came from there.
        held = [kept[other] for other in stages if not stage < other <= reach[stage]]
        peaks.append(_added_by_backward(instance, stage) + sum(held))
    return max(peaks, default=0)


def _added_by_backward(instance: ScheduleInstance, stage: int) -> int:
    """Return the most bytes that a stage takes from its recompute to the end of its backward.

    An input backward may leave more than it finds, until the weight backward frees all.
    """
    changes = [instance.task_bytes[kind][stage] for kind in instance.kinds[stage][1:]]
    return max(0, *accumulate(changes))


def serial_order(instance: ScheduleInstance) -> Rows | None:
    """Return one microbatch after the other, each in the order that holds the least.

    None if no order at all fits within the caps.
    """
    # It never holds two microbatches, and one in the order that
    # needs the least: if this exceeds a cap, so does every order.
    steps = _single_microbatch(instance)
    if steps is None:
        return None
    rows: Rows = [[] for _ in instance.stages_by_rank]
    for microbatch in range(instance.problem.microbatches):
        for kind, stage in steps:
            rank = instance.problem.placement[stage]
            rows[rank].append(instance.operation(kind, stage, microbatch))
    return rows


def _single_microbatch(instance: ScheduleInstance) -> list[tuple[int, int]] | None:
    """Return kinds and stages of one microbatch; None if no order fits.

    Every backward comes as soon as there is memory for it and its recompute. With its weight
    backward it frees at least what it takes, so no order can need it to come later.
    """
    problem, held = instance.problem, [0] * instance.problem.ranks
    steps: list[tuple[int, int]] = []
    next_forward, unfinished = 0, set(range(problem.stages))

    def fits(stage: int, size: int) -> bool:
        rank = problem.placement[stage]
        return problem.caps is None or held[rank] + size <= problem.caps[rank]

    def can_go_back(stage: int) -> bool:
        inputs = instance.task_inputs[BACKWARD][stage]
        waits = any(source in unfinished for _, source, _ in inputs)
        return (
            stage in unfinished and not waits and fits(stage, _added_by_backward(instance, stage))
        )

    while unfinished:
        # The deepest stage that can go back does so; else the next forward runs.
        # With gradients over all boundaries that is only the last
        # stage, once all forwards are done; where a boundary has none,
        # stages before it may go back, and make room, much earlier.
        stage = next(filter(can_go_back, reversed(range(next_forward))), None)
        if stage is not None:
            unfinished.remove(stage)
            kinds = instance.kinds[stage][1:]
        elif next_forward < problem.stages and fits(
            next_forward, instance.task_bytes[FORWARD][next_forward]
        ):
            stage, kinds = next_forward, (FORWARD,)
            next_forward += 1
        else:
            return None
        held[problem.placement[stage]] += sum(instance.task_bytes[kind][stage] for kind in kinds)
        steps += [(kind, stage) for kind in kinds]
    return steps
