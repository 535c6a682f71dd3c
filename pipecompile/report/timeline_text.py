"""A simulated step as text: one line a rank, one column a slice of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipecompile.ir.schedule import BACKWARDS, Event, Idle, Kind, Timeline
from pipecompile.report.units import percent

__all__ = ["IDLE_CAUSES", "idle_shares", "timeline_text"]

IDLE_CAUSES = ("dependency", "transfer", "memory", "imbalance")
_LEGEND = "        0 1 2 … forward   a b c … backward   r recompute   · idle"
_FORWARD_LEGEND = "        0 1 2 … forward   · idle"


def idle_shares(idle: Idle, makespan_ns: int) -> list[str]:
    """Return all idle time and that of each of IDLE_CAUSES, as shares of the step."""
    causes = [idle.dependency_ns, idle.transfer_ns, idle.memory_ns, idle.imbalance_ns]
    return [percent(time, max(makespan_ns, 1)) for time in (idle.total_ns, *causes)]


def timeline_text(
    timeline: Timeline,
    recompute: Mapping[int, float] = MappingProxyType({}),
    width: int = 90,
) -> str:
    """Return one line a rank, time from left to right, and a legend of the letters.

    `recompute` is by stage the share of a backward in which regions are recomputed.
    """
    scale = width / max(timeline.makespan_ns, 1)
    lines = [
        f"rank {rank:>2} {_line(row, recompute, scale, width)}"
        for rank, row in enumerate(timeline.events)
    ]
    trains = any(event.action.kind in BACKWARDS for row in timeline.events for event in row)
    return "\n".join([*lines, _LEGEND if trains else _FORWARD_LEGEND]) + "\n"


def _line(row: Sequence[Event], recompute: Mapping[int, float], scale: float, width: int) -> str:
    # Rounding both ends down keeps neighbours apart; an action under one column may vanish.
    cells = ["·"] * width
    for event in row:
        begin, end = int(event.start_ns * scale), int(event.end_ns * scale)
        cells[begin:end] = _letter(event) * (end - begin)
        if event.action.kind is Kind.BACKWARD:
            # Regions are recomputed as the backward comes to them. Drawn together at its begin
            # they show how much of it that is, not when.
            columns = round((end - begin) * recompute.get(event.action.stage, 0))
            cells[begin : begin + columns] = "r" * columns
    return "".join(cells)


def _letter(event: Event) -> str:
    # One column has room for one letter: microbatch 12 is shown as 2 and c, after 11 as 1 and b.
    number = (event.action.microbatch or 0) % 10
    if event.action.kind is Kind.FORWARD:
        return str(number)
    if event.action.kind is Kind.BACKWARD_WEIGHT:
        return "w"
    return "abcdefghij"[number] if event.action.kind in BACKWARDS else "r"
