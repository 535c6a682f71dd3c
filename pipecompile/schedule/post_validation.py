"""What a step may begin with before the last update is validated, and how long steps then take.

With post-validation (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 4 and
appendix C) a rank updates its weights before it knows the norm of all gradients, and goes on with
the forwards of the next step. It reads the norm before its first other action:

    rank 0   … B STEP │ F0 F1 F2 F3 ─ norm ─ B0 …
    rank 1       … B STEP │ F0 F1 F2 ─ norm ─ B0 …
    rank 2          … B STEP │ F0 F1 ─ norm ─ B0 …      its B is the last action of the step before

The forwards that come before are the *leading forwards*. If the norm says that the update was a
wrong one, all ranks repeat them. So a rank counts as leading only what others have sent before they
read the norm themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.schedule import Action, Kind, Schedule, Timeline

__all__ = ["leading_forwards", "step_in_a_row_ns"]


def leading_forwards(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank how many actions of its row come before it reads the norm: forwards,
    and their messages from and to other ranks.
    """
    counts = [0] * schedule.ranks
    sent = set[tuple[int, int | None]]()
    before = None
    # What a rank sends may let others lead with more, and a V comes back to the first rank.
    # ZB-V on 2 ranks: rank 1 leads with 1F0 2F0 1F1 2F1 and sends 2F0, so that
    # rank 0 leads with 3F0 as well, behind 0F0 0F1 0F2. Its 3I0 ends that.
    while counts != before:
        before = list(counts)
        for rank, row in enumerate(schedule.rows):
            counts[rank] += _more(row[counts[rank] :], sent)
    return tuple(counts)


def _more(row: Sequence[Action], sent: set[tuple[int, int | None]]) -> int:
    """Return how many actions at the beginning of `row` are leading, and note in `sent` what they
    send by stage and microbatch.
    """
    for count, action in enumerate(row):
        key = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                pass
            case Kind.SEND_FORWARD:
                sent.add(key)
            case Kind.RECEIVE_FORWARD if (action.stage - 1, action.microbatch) in sent:
                pass
            case _:
                return count
    return len(row)


def step_in_a_row_ns(schedule: Schedule, timeline: Timeline) -> int:
    """Return what a step takes among many that follow each other with post-validation.

    Each rank repeats its part of the `timeline` in that time: it begins when it has done the last
    step, and reads the norm when all ranks have. The time of the norm's messages and of the update
    is not in it, as it is not in the step.
    """
    # A rank begins a step when it has done the last one, so no rank's step is shorter than its
    # own span. And nobody passes the norm before all ranks have done the last step: from its
    # earliest non-leading action to the end of the step it takes as long as in the timeline.
    rows = [
        sorted([*row, *sums], key=lambda event: event.end_ns)
        for row, sums in zip(timeline.events, timeline.reductions, strict=True)
    ]
    spans = [row[-1].end_ns - row[0].start_ns for row in rows if row]
    behind = []
    leading = leading_forwards(schedule)
    for row, events, count in zip(schedule.rows, timeline.events, leading, strict=True):
        first = _forwards(row[:count])
        if first < len(events):
            behind.append(events[first].start_ns)
    return max([*spans, timeline.makespan_ns - min(behind, default=0)], default=0)


def _forwards(actions: Sequence[Action]) -> int:
    return sum(action.kind is Kind.FORWARD for action in actions)
