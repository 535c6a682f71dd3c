"""A simulated step for people: how long it takes, why each rank idles, and what would have to be faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from pipecompile.ir.schedule import CriticalEvent, Timeline
from pipecompile.report.text import idle_shares, size_text, table, time_text, timeline_text

__all__ = ["step_figures", "step_text"]

_SHOWN = 12  # actions of the critical path, at most, from each end of a rank's part


def step_figures(timeline: Timeline, path: Sequence[CriticalEvent]) -> dict[str, Any]:
    """The same for scripts, and what each rank's activations hold, as (ns, bytes from then on).

    Of the critical path rank, action, start, end, and why it does not begin earlier.
    """
    return {
        "makespan_ns": timeline.makespan_ns,
        "span_ns": timeline.span_ns,
        "bubble": timeline.bubble,
        "idle": [msgspec.to_builtins(idle) for idle in timeline.idle],
        "peak_activation_bytes": timeline.peak_bytes,
        "activations": [timeline.memory(rank) for rank in range(len(timeline.events))],
        "critical_path": [
            [c.rank, str(c.event.action), c.event.start_ns, c.event.end_ns, c.why] for c in path
        ],
    }


def step_text(timeline: Timeline, path: Sequence[CriticalEvent]) -> str:
    """Figures, idle time by cause and the bound of the activations of each rank, the critical path, the timeline."""
    step, span = time_text(timeline.makespan_ns), time_text(timeline.span_ns)
    head = [f"step {step}, largest span {span}, bubble {timeline.bubble:.1%}"]
    parts = [head, list(_ranks(timeline)), list(_path(timeline, path))]
    return "\n\n".join(["\n".join(part) for part in parts if part] + [timeline_text(timeline)])


def _ranks(timeline: Timeline) -> Iterator[str]:
    rows = [["rank", "idle", "dependency", "transfer", "memory", "imbalance", "activations ≤"]]
    for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_bytes, strict=True)):
        rows.append([str(rank), *idle_shares(idle, timeline.makespan_ns), size_text(peak)])
    return table(rows, left=set())


def _path(timeline: Timeline, path: Sequence[CriticalEvent]) -> Iterator[str]:
    """The critical path, rank by rank, and how much of it is computed and how much under way."""
    if not path:
        return
    busy = sum(critical.event.end_ns - critical.event.start_ns for critical in path)
    reasons = Counter(
        critical.why for critical in path if critical.why in ("transfer", "queue", "send")
    )
    away = time_text(timeline.makespan_ns - busy)
    messages = f", {away} in {sum(reasons.values())} messages" if reasons else ""
    yield f"critical path: {len(path)} actions, {time_text(busy)} of compute{messages}"
    for rank, part in groupby(path, key=lambda critical: critical.rank):
        actions = [str(critical.event.action) for critical in part]
        if len(actions) > _SHOWN:
            actions = [
                *actions[: _SHOWN // 2],
                f"… {len(actions) - _SHOWN} more …",
                *actions[-_SHOWN // 2 :],
            ]
        yield f"  rank {rank:>2}  {' '.join(actions)}"
