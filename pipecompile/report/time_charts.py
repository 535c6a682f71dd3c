"""What the charts of a page draw over time: the actions of each rank, and what it holds in them.

templates/charts.js reads this. Times are whole nanoseconds, or relative units.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from pipecompile.ir.duration import time_scale
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, Action, Event, Kind, Timeline
from pipecompile.memory_model.rank import memory_of_actions
from pipecompile.report.memory import MemoryBound

__all__ = ["KIND_NAMES", "NamedTimeline", "chart_data", "kinds_drawn", "memory_rows"]

KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
    Kind.RECOMPUTE: "recompute",
    Kind.REDUCE: "sum of gradients",
    Kind.STEP: "optimizer step",
}


@dataclass(frozen=True)
class NamedTimeline:
    """A step under a name, such as predicted; `recompute` is by stage the share of a backward in
    which regions are recomputed.
    """

    name: str
    timeline: Timeline
    recompute: Mapping[int, float]


def chart_data(
    timelines: Sequence[NamedTimeline], memory: Mapping[str, Any], time_unit: TimeUnit
) -> str:
    """Return the data of all charts as JSON, compressed (zlib) and as text (base64).

    64 ranks with 512 microbatches have 65,000 actions. As columns of differences, in which numbers
    repeat, and compressed, they take some hundred kB.
    """
    data = {
        "units": _units(time_unit),
        "length": max(each.timeline.makespan_ns for each in timelines),
        "kinds": {kind.value: name for kind, name in KIND_NAMES.items()},
        "timelines": [_timeline(each) for each in timelines],
        "memory": memory,
    }
    # Sorted and without spaces: the same plan gives the same page, byte for byte.
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def _units(time_unit: TimeUnit) -> list[tuple[str, float]]:
    """Return the units of time with what each is in the unit of the plan, the largest first."""
    scales = (time_scale(10.0**power, time_unit) for power in (9, 6, 3, 0))
    if time_unit == "relative":
        return [(f"{name} units".lstrip(), scale) for name, scale in scales]
    return list(scales)


def kinds_drawn(timelines: Sequence[NamedTimeline]) -> list[str]:
    """Return the kinds of actions that these timelines show, for their key."""
    rows = chain.from_iterable(each.timeline.events for each in timelines)
    used = {event.action.kind for row in rows for event in row}
    if any(share for each in timelines for share in each.recompute.values()):
        # Regions are recomputed within backwards, and have no events of their own.
        used.add(Kind.RECOMPUTE)
    return [name for kind, name in KIND_NAMES.items() if kind in used]


def memory_rows(
    plan: Plan,
    timeline: Timeline,
    kinds: Sequence[str],
    bounds: Sequence[MemoryBound],
    measured: Sequence[int | None],
) -> dict[str, Any]:
    """Return what each rank holds over a step: `kinds` in each action, its cap, its bound, and the
    peak that was `measured`.
    """
    return {
        "kinds": list(kinds),
        "ranks": [
            {"cap": bound.cap, "bound": bound.bound, "measured": peak}
            | _memory_columns(plan, rank, timeline, kinds)
            for rank, (bound, peak) in enumerate(zip(bounds, measured, strict=True))
        ],
    }


def _memory_columns(
    plan: Plan, rank: int, timeline: Timeline, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return the actions of a rank, and by kind how many bytes more it holds in each of them than
    in the one before it.

    A sum over replicas is put at the end of the action before it, and the optimizer's step at the
    end of all, with no length: how long they take is not in the timeline's events.
    """
    # The memory model has a snapshot for each action that computes, in the order of the events,
    # and others besides.
    computing, at, events, held = iter(timeline.events[rank]), 0, [], []
    for snapshot, memory in memory_of_actions(plan, rank):
        if snapshot.kind in COMPUTE:
            events.append(next(computing))
            at = events[-1].end_ns
        else:
            at = timeline.makespan_ns if snapshot.kind is Kind.STEP else at
            events.append(Event(Action(snapshot.stage, snapshot.kind), at, at))
        held.append([getattr(memory, kind).expected for kind in kinds])
    return {"actions": _columns(events), "bytes": [_changes(c) for c in zip(*held, strict=True)]}


def _timeline(named: NamedTimeline) -> dict[str, Any]:
    timeline = named.timeline
    return {
        "name": named.name,
        "idle": [1 - busy / max(timeline.makespan_ns, 1) for busy in timeline.busy_ns],
        "recompute": {str(stage): share for stage, share in named.recompute.items()},
        "ranks": [_columns(row) for row in timeline.events],
    }


def _columns(row: Sequence[Event]) -> list[list[Any]]:
    """Return the columns stage, kind, microbatch, time since the action before it, and length."""
    # 0F0 from 10 to 30 and 0F1 from 30 to 50 are the waits 10, 0 and the lengths 20, 20: numbers
    # that repeat, which compress well.
    ends = [0, *(event.end_ns for event in row)]
    return [
        [event.action.stage for event in row],
        [event.action.kind.value for event in row],
        [event.action.microbatch for event in row],
        [event.start_ns - end for event, end in zip(row, ends, strict=False)],
        [event.end_ns - event.start_ns for event in row],
    ]


def _changes(values: Sequence[int]) -> list[int]:
    """Return each value less the one before it, and the first as it is."""
    return [after - before for before, after in pairwise([0, *values])]
