"""Weight gradients where they cost nothing: in waits that hold them, and behind the last backward.

No rank waits for them, so all that matters is when their own rank is free, what they hold, and that they are done in
the end. On large problems, where every other step of a search is dear, this alone gains what is left.
"""

from __future__ import annotations

from pipecompile.schedule.instance import BACKWARD, WEIGHT, OrderTimes, Rows, ScheduleInstance

__all__ = ["advance_weight_gradients", "postpone_weight_gradients"]


def postpone_weight_gradients(instance: ScheduleInstance, rows: Rows, times: OrderTimes) -> Rows:
    """From before each rank's last backward to behind it, as many as there is time for until the step ends."""
    return [_row_later(instance, row, times) for row in rows]


def _row_later(instance: ScheduleInstance, row: list[int], times: OrderTimes) -> list[int]:
    kinds = [instance.decode(operation)[0] for operation in row]
    if WEIGHT not in kinds:
        return row
    last = len(kinds) - 1 - kinds[::-1].index(BACKWARD)
    room, moved = times.makespan_ns - times.ends[row[-1]], set[int]()
    for index in range(last - 1, -1, -1):
        if kinds[index] == WEIGHT:
            room -= instance.durations[row[index]]
            if room < 0:
                break
            moved.add(index)
    before = [operation for index, operation in enumerate(row[: last + 1]) if index not in moved]
    return [*before, *(row[index] for index in sorted(moved)), *row[last + 1 :]]


def advance_weight_gradients(instance: ScheduleInstance, rows: Rows, times: OrderTimes) -> Rows:
    """Into the waits of each rank, where they delay nothing."""
    return [_row_earlier(instance, row, times) for row in rows]


def _row_earlier(instance: ScheduleInstance, row: list[int], times: OrderTimes) -> list[int]:
    found: list[int] = []
    pending: dict[int, list[int]] = {}  # by stage, microbatches after their backward, in order
    ahead: dict[int, int] = {}  # by stage, how many are done before their place
    free = times.ends[row[0]] if row else 0
    for operation in row:
        kind, stage, microbatch = instance.decode(operation)
        wait = times.ends[operation] - instance.durations[operation] - free
        while wait > 0:
            fitting_names = [
                s
                for s, waiting in pending.items()
                if waiting and instance.task_ns[WEIGHT][s] <= wait
            ]
            if not fitting_names:
                break
            chosen = max(fitting_names, key=lambda s: (len(pending[s]), -s))
            wait -= instance.task_ns[WEIGHT][chosen]
            found.append(instance.operation(WEIGHT, chosen, pending[chosen].pop(0)))
            ahead[chosen] = ahead.get(chosen, 0) + 1
        free = times.ends[operation]
        if kind == WEIGHT and ahead.get(stage):
            ahead[stage] -= 1
        elif kind == WEIGHT:
            found.append(instance.operation(WEIGHT, stage, pending[stage].pop(0)))
        else:
            found.append(operation)
            if kind == BACKWARD and instance.split[stage]:
                pending.setdefault(stage, []).append(microbatch)
    return found
