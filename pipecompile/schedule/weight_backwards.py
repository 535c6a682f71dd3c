"""Moves weight backwards to where they cost nothing: into waits, and behind the last backward.

No other rank waits for them. All that matters is when their own rank is free, what they hold, and
that they are done in the end. On large problems, where each step of a search takes long, this alone
gains most of what is left.

    before      F0 F1 I0 .  I1 W0 W1
    advanced    F0 F1 I0 W0 I1 W1           the wait takes W0

    before      F0 F1 I0 W0 I1 W1 .  .      other ranks still compute at the end
    postponed   F0 F1 I0 I1 W0 W1 .  .      the rank before gets I1 earlier
"""

from __future__ import annotations

from pipecompile.schedule.instance import BACKWARD, WEIGHT, OrderTimes, Rows, ScheduleInstance

__all__ = ["advance_weight_backwards", "postpone_weight_backwards"]


def postpone_weight_backwards(instance: ScheduleInstance, rows: Rows, times: OrderTimes) -> Rows:
    """Return the order with weight backwards moved behind the last backward of their rank.

    These are as many as there is time for until the step ends.
    """
    return [_postponed(instance, row, times) for row in rows]


def _postponed(instance: ScheduleInstance, row: list[int], times: OrderTimes) -> list[int]:
    """Return a rank's row with its last weight backwards behind its last backward.

    As many are moved as there is time for between the end of the row and that of the step.
    """
    kinds = [instance.decode(operation)[0] for operation in row]
    if WEIGHT not in kinds:
        return row
    # The index of the last backward.
    last = len(kinds) - 1 - kinds[::-1].index(BACKWARD)
    left_ns, moved = times.makespan_ns - times.ends[row[-1]], set[int]()
    for index in range(last - 1, -1, -1):
        if kinds[index] == WEIGHT:
            left_ns -= instance.durations[row[index]]
            # Only those nearest to the end move, so that their order stays.
            if left_ns < 0:
                break
            moved.add(index)
    before = [operation for index, operation in enumerate(row[: last + 1]) if index not in moved]
    return [*before, *(row[index] for index in sorted(moved)), *row[last + 1 :]]


def advance_weight_backwards(instance: ScheduleInstance, rows: Rows, times: OrderTimes) -> Rows:
    """Return the order with weight backwards moved into earlier waits of their rank that fit them.

    They delay nothing there.
    """
    return [_advanced(instance, row, times) for row in rows]


def _advanced(instance: ScheduleInstance, row: list[int], times: OrderTimes) -> list[int]:
    """Return a rank's row with weight backwards in the waits that they fit, first waits first."""
    advanced: list[int] = []
    # By stage the microbatches whose weight backward is due, and how many of them have been
    # moved forward, so that as many later places are dropped.
    pending: dict[int, list[int]] = {}
    moved: dict[int, int] = {}
    free_ns = times.ends[row[0]] if row else 0
    for operation in row:
        kind, stage, microbatch = instance.decode(operation)
        # How long the rank waits before this operation.
        wait_ns = times.ends[operation] - instance.durations[operation] - free_ns
        while wait_ns > 0:
            chosen = _fitting_stage(instance, pending, wait_ns)
            if chosen is None:
                break
            wait_ns -= instance.task_ns[WEIGHT][chosen]
            advanced.append(instance.operation(WEIGHT, chosen, pending[chosen].pop(0)))
            moved[chosen] = moved.get(chosen, 0) + 1
        free_ns = times.ends[operation]
        if kind != WEIGHT:
            advanced.append(operation)
            if kind == BACKWARD and instance.split[stage]:
                pending.setdefault(stage, []).append(microbatch)
        elif moved.get(stage):
            moved[stage] -= 1
        else:
            advanced.append(instance.operation(WEIGHT, stage, pending[stage].pop(0)))
    return advanced


def _fitting_stage(
    instance: ScheduleInstance, pending: dict[int, list[int]], wait_ns: int
) -> int | None:
    """Return the stage with the most weight backwards due, of those for which one fits."""
    fitting = [
        stage
        for stage, microbatches in pending.items()
        if microbatches and instance.task_ns[WEIGHT][stage] <= wait_ns
    ]
    return max(fitting, key=lambda stage: (len(pending[stage]), -stage), default=None)
