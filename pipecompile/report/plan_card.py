"""A plan in short, as a part of someone else's page: what a notebook shows of it.

It has no script, no style sheet and no id, so it cannot disturb what is around it, and its colours
are seen on light and on dark pages.
"""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Event, Kind, Timeline
from pipecompile.ir.size import size_text
from pipecompile.ir.stage_ranks import ranks_text
from pipecompile.report.memory import cap_text, memory_bounds
from pipecompile.report.plan_head import headline
from pipecompile.report.templates import page
from pipecompile.report.time_charts import KIND_NAMES
from pipecompile.report.units import percent

__all__ = ["plan_card"]

_COLOURS = {
    Kind.FORWARD: "#4f83cc",
    Kind.BACKWARD: "#d2741f",
    Kind.BACKWARD_INPUT: "#d2741f",
    Kind.BACKWARD_WEIGHT: "#5f9a60",
    Kind.RECOMPUTE: "#9ab8e4",
}
# In units of the picture, which is stretched to the width of the notebook.
_WIDTH, _ROW = 2000, 10
_MOST_ACTIONS, _MOST_STAGES = 8000, 32


def plan_card(plan: Plan, timeline: Timeline) -> str:
    """Return the card as HTML: at most some 100 kB, however large the plan is."""
    actions = sum(map(len, timeline.events))
    # A notebook keeps the card in its file: more actions than pixels would only make that larger.
    picture = _picture(timeline).encode() if actions <= _MOST_ACTIONS else b""
    used = {event.action.kind for row in timeline.events for event in row}
    return page(
        "card.html",
        time_unit=plan.time_unit,
        headline=headline(plan),
        figures=list(_figures(plan)),
        picture=b64encode(picture).decode(),
        height=round(min(max(24 * plan.ranks, 60), 360)),
        key=[(KIND_NAMES[kind], colour) for kind, colour in _COLOURS.items() if kind in used],
        actions=actions,
        stages=list(_stages(plan))[:_MOST_STAGES],
        more=max(plan.k - _MOST_STAGES, 0),
    )


def _figures(plan: Plan) -> Iterator[str]:
    prediction = plan.prediction
    yield f"step {time_with_unit(prediction.step_ns, plan.time_unit)}"
    yield f"bubble {prediction.bubble:.1%}"
    largest = max(bound.bound for bound in memory_bounds(plan))
    yield f"memory at most {size_text(largest)} a rank ({cap_text(plan)})"


def _stages(plan: Plan) -> Iterator[list[str]]:
    times = [stage.forward_ns + stage.backward_ns + stage.extra_ns for stage in plan.stages]
    for index, (stage, time) in enumerate(zip(plan.stages, times, strict=True)):
        yield [
            str(index),
            ranks_text(plan.schedule.stage_ranks[index]),
            ", ".join(stage.modules),
            time_with_unit(time, plan.time_unit),
            percent(time * plan.k, sum(times)),
        ]


def _picture(timeline: Timeline) -> str:
    """Return the timeline as SVG without words: a path of lines for each kind of action."""
    lines: dict[Kind, list[str]] = defaultdict(list)
    scale = _WIDTH / max(timeline.makespan_ns, 1)
    for rank, row in enumerate(timeline.events):
        for event in row:
            lines[event.action.kind].append(_line(event, rank, scale))
    height = _ROW * len(timeline.events)
    paths = [
        f'<path stroke="{colour}" d="{"".join(lines[kind])}"/>'
        for kind, colour in _COLOURS.items()
        if kind in lines
    ]
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'preserveAspectRatio="none" fill="none" stroke-width="{0.8 * _ROW:g}">',
            f'<path stroke="#888" stroke-opacity="0.15" d="{_tracks(timeline.events)}"/>',
            *paths,
            "</svg>",
        ]
    )


def _tracks(rows: Sequence[Sequence[Event]]) -> str:
    return "".join(f"M0 {_middle(rank)}H{_WIDTH}" for rank in range(len(rows)))


def _line(event: Event, rank: int, scale: float) -> str:
    """Return an action as a line as thick as its row, a little shorter than it takes."""
    start, end = round(event.start_ns * scale), round(event.end_ns * scale)
    # Two units less, so that neighbours of one kind are seen as two.
    return f"M{start} {_middle(rank)}h{max(end - start - 2, 1)}"


def _middle(rank: int) -> int:
    return _ROW * rank + _ROW // 2
