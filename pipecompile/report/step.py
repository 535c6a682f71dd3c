"""A simulated step for people: how long it takes, why ranks idle, and what decides its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import CriticalEvent, Timeline
from pipecompile.ir.size import size_text
from pipecompile.report.recompute import recompute_shares
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.report.timeline_text import IDLE_CAUSES, idle_shares, timeline_text
from pipecompile.report.units import costs_text

__all__ = ["step_figures", "step_text"]

_SHOWN = 12  # actions of a rank's part of the critical path: half from its start, half from its end


def step_figures(
    plan: Plan, timeline: Timeline, path: Sequence[CriticalEvent], in_a_row_ns: int | None = None
) -> dict[str, Any]:
    """Return the step for scripts.

    `in_a_row_ns` is what a step takes among many with post-validation, None without, and
    `minibatch_ns` what a minibatch takes in a full pipeline, null unless the schedule is
    asynchronous. `memory` is what each rank holds at its peak, as the plan has it.
    `activation_bounds` are the bytes that microbatches in flight keep on each rank at most: pairs
    of a time and of the bytes from then on. Of each action on the critical path: rank, action,
    start, end, and why it does not begin earlier.
    """
    return {
        "time_unit": plan.time_unit,
        "makespan_ns": timeline.makespan_ns,
        "minibatch_ns": plan.prediction.minibatch_ns,
        "span_ns": timeline.span_ns,
        "in_a_row_ns": in_a_row_ns,
        "bubble": timeline.bubble,
        "idle": [msgspec.to_builtins(idle) for idle in timeline.idle],
        "memory": [msgspec.to_builtins(memory) for memory in plan.prediction.memory],
        "activation_bounds": [timeline.memory(rank) for rank in range(len(timeline.events))],
        "critical_path": [
            [c.rank, str(c.event.action), c.event.start_ns, c.event.end_ns, c.why] for c in path
        ],
    }


def step_text(
    plan: Plan,
    timeline: Timeline,
    path: Sequence[CriticalEvent],
    draw: DrawTable = plain_table,
    in_a_row_ns: int | None = None,
) -> str:
    """Return the step as `simulate` prints it: figures, ranks, critical path, timeline.

    `in_a_row_ns` is what it takes among many with post-validation, None without.
    """
    step, span = (
        time_with_unit(time_ns, plan.time_unit)
        for time_ns in (timeline.makespan_ns, timeline.span_ns)
    )
    head = [
        f"step {step}, largest span {span}, bubble {timeline.bubble:.1%}",
        f"costs {costs_text(plan.options.costs, plan.time_unit)}",
    ]
    if in_a_row_ns is not None:
        in_a_row = time_with_unit(in_a_row_ns, plan.time_unit)
        # Right below the step, whose alternative it is.
        head.insert(1, f"in a row, with updates that are validated later: {in_a_row} a step")
    if plan.prediction.minibatch_ns is not None:
        minibatch = time_with_unit(plan.prediction.minibatch_ns, plan.time_unit)
        head.append(f"this is one minibatch alone; in a full pipeline one takes {minibatch}")
    parts = [head, list(_ranks(plan, timeline, draw)), list(_path(plan, timeline, path))]
    return "\n\n".join(
        ["\n".join(part) for part in parts if part]
        + [timeline_text(timeline, recompute_shares(plan))]
    )


def _ranks(plan: Plan, timeline: Timeline, draw: DrawTable) -> Iterator[str]:
    """Idle time by cause, and memory at the rank's peak: the figures that `show` prints."""
    rows = [["rank", "load", "idle", *IDLE_CAUSES, "activations", "expected", "bound"]]
    for rank, memory in enumerate(plan.prediction.memory):
        sizes = [memory.activations.expected, memory.total.expected, memory.total.bound]
        rows.append(
            [
                str(rank),
                time_text(plan.prediction.loads_ns[rank], plan.time_unit),
                *idle_shares(timeline.idle[rank], timeline.makespan_ns),
                *map(size_text, sizes),
            ]
        )
    return draw(rows, ())


def _path(plan: Plan, timeline: Timeline, path: Sequence[CriticalEvent]) -> Iterator[str]:
    """Yield the critical path, rank by rank, and how much of it is computed and how much is
    transfers.
    """
    if not path:
        return
    busy = sum(critical.event.end_ns - critical.event.start_ns for critical in path)
    # What is not compute on the path is time in which a message holds up the next action.
    reasons = Counter(critical.why for critical in path)
    messages = reasons["transfer"] + reasons["queue"] + reasons["send"]
    away = time_with_unit(timeline.makespan_ns - busy, plan.time_unit)
    waits = f", {away} in {messages} messages" if messages else ""
    compute = time_with_unit(busy, plan.time_unit)
    yield f"critical path: {len(path)} actions, {compute} of compute{waits}"
    # The path goes down and up the pipeline, so that a rank comes again and again: 0F0 on rank 0,
    # 1F0 1B0 on rank 1, 0B0 on rank 0 are three lines.
    for rank, part in groupby(path, key=lambda critical: critical.rank):
        actions = [str(critical.event.action) for critical in part]
        if len(actions) > _SHOWN:
            more = f"… {len(actions) - _SHOWN} more …"
            actions = [*actions[: _SHOWN // 2], more, *actions[-_SHOWN // 2 :]]
        yield f"  rank {rank:>2}  {' '.join(actions)}"
