"""A simulated step as a picture (SVG): ranks from top to bottom, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from xml.sax.saxutils import escape

from pipecompile.ir.duration import time_scale, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Event, Kind, Timeline
from pipecompile.report.plan_head import headline
from pipecompile.report.recompute import recompute_shares

__all__ = ["picture", "timeline_svg"]

# In pixels:
#
#            _LEFT                          _RIGHT
#     title
#     _TOP   |                              |
#     rank 0 |███  ███  (_BAR of _ROW)      | idle share
#     rank 1 |   ███  ███                   | idle share
#     _BOTTOM: times and their unit, then the legend
_WIDTH, _LEFT, _RIGHT = 1000, 78, 92
_TOP, _ROW, _BAR, _BOTTOM = 74, 40, 32, 62
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_COLOURS = {
    Kind.FORWARD: ("forward", "#4f83cc", "#ffffff"),
    Kind.BACKWARD: ("backward", "#d2741f", "#ffffff"),
    Kind.BACKWARD_INPUT: ("backward, inputs", "#d2741f", "#ffffff"),
    Kind.BACKWARD_WEIGHT: ("backward, weights", "#6aa56b", "#ffffff"),
    Kind.RECOMPUTE: ("recompute", "url(#recompute)", "#12243a"),
}
# A recompute is a forward once more: the blue of forwards, hatched, which is seen in grey too.
_HATCHING = (
    '<defs><pattern id="recompute" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#dfe9f7"/>'
    '<rect width="2.5" height="6" fill="#4f83cc"/></pattern></defs>'
)


@dataclass(frozen=True)
class _Scale:
    """From times and ranks to places in the picture.

    Times are written in `unit`, of `unit_ns` each. `recompute` is the share of a stage's backward
    in which it recomputes regions.
    """

    length_ns: int
    ranks: int
    unit: str
    unit_ns: float
    recompute: Mapping[int, float]

    @property
    def inner(self) -> int:
        return _WIDTH - _LEFT - _RIGHT

    @property
    def bottom(self) -> int:
        return _TOP + _ROW * self.ranks

    def x(self, time_ns: int | float) -> float:
        return _LEFT + self.inner * time_ns / max(self.length_ns, 1)

    def y(self, rank: int) -> float:
        return _TOP + _ROW * rank + (_ROW - _BAR) / 2


def timeline_svg(plan: Plan, timeline: Timeline) -> str:
    """Return the step of a plan; where a backward recomputes regions, its first part shows that."""
    return picture(headline(plan), timeline, plan.time_unit, recompute_shares(plan))


def picture(
    headline: str,
    timeline: Timeline,
    time_unit: TimeUnit = "ns",
    recompute: Mapping[int, float] = MappingProxyType({}),
    length_ns: int = 0,
) -> str:
    """Return a self-contained SVG of a step, with its own background and no scripts or fonts.

    `recompute` is by stage the share of a backward in which regions are recomputed. The width
    stands for `length_ns`, or for the step if that is longer: pictures of one length can be
    compared.
    """
    length_ns = max(length_ns, timeline.makespan_ns)
    name, unit_ns = time_scale(length_ns, time_unit)
    unit = f"{name} units".lstrip() if time_unit == "relative" else name
    scale = _Scale(length_ns, len(timeline.events), unit, unit_ns, recompute)
    height = scale.bottom + _BOTTOM
    body = [
        *_title(headline, timeline, time_unit),
        *_axis(scale),
        *_ranks(timeline, scale),
        *_legend(timeline, scale),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" '
            f'height="{height}" font-family="{_FONT}" font-size="12" role="img">',
            f"<title>{escape(headline)}</title>",
            _HATCHING,
            f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#fbfbfa" stroke="#d9d9d6"/>',
            *body,
            "</svg>\n",
        ]
    )


def _title(headline: str, timeline: Timeline, time_unit: TimeUnit) -> Iterator[str]:
    step = time_with_unit(timeline.makespan_ns, time_unit)
    note = " (relative, not seconds)" if time_unit == "relative" else ""
    figures = f"step {step}{note}, bubble {timeline.bubble:.1%}"
    yield _text(20, 32, headline, size=16, weight=600, colour="#1f2328")
    yield _text(20, 52, figures, colour="#59636e")
    yield _text(_WIDTH - 20, _TOP - 8, "idle", anchor="end", colour="#59636e")


def _axis(scale: _Scale) -> Iterator[str]:
    """Vertical lines at round times, labelled in the unit of the whole length."""
    length = scale.length_ns / scale.unit_ns
    # At most eight spans: for 58 ms each has 10 ms, since 58 / 8 = 7.25.
    step = round_step(length / 8)
    digits = max(0, -math.floor(math.log10(step)))
    # The last line may fall on the end of the step, which rounding must not push beyond it.
    for index in range(int(length / step + 1e-9) + 1):
        x = scale.x(index * step * scale.unit_ns)
        label = f"{index * step:,.{digits}f}"
        yield f'<line x1="{x:.2f}" y1="{_TOP}" x2="{x:.2f}" y2="{scale.bottom}" stroke="#e4e4e1"/>'
        yield _text(x, scale.bottom + 18, label, anchor="middle", colour="#59636e")
    yield _text(_WIDTH - 20, scale.bottom + 18, scale.unit, anchor="end", colour="#59636e")


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least or 1))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _ranks(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    for rank, (row, busy) in enumerate(zip(timeline.events, timeline.busy_ns, strict=True)):
        y, idle = scale.y(rank), 1 - busy / max(timeline.makespan_ns, 1)
        base = y + _BAR / 2 + 4
        yield (
            f'<rect x="{_LEFT}" y="{y}" width="{scale.inner}" height="{_BAR}" fill="#1f2328" '
            'fill-opacity="0.05"/>'
        )
        yield _text(20, base, f"rank {rank}", colour="#1f2328")
        heights = _heights(row)
        for event in row:
            yield from _event(event, scale, y, heights[event.action.stage])
        yield _text(_WIDTH - 20, base, f"{idle:.1%}", anchor="end", colour="#1f2328")


def _heights(row: Sequence[Event]) -> dict[int, int]:
    """Return how high each stage of a rank is drawn: the first one as high as the row, the others
    lower, like stairs.

        ███     ███
        ███ ▄▄▄ ███ ▄▄▄    stages 0, 2, 0, 2 of a rank

    Colours and hatching say what an action does, so they cannot say its stage too.
    """
    stages = sorted({event.action.stage for event in row})
    # The last of many still has room for small numbers: 14 of 32 pixels.
    step = min(10, 18 // max(len(stages) - 1, 1))
    return {stage: max(_BAR - index * step, 14) for index, stage in enumerate(stages)}


def _event(event: Event, scale: _Scale, row: float, height: int) -> Iterator[str]:
    """Yield the bar of an action, the part in which it recomputes, and its microbatch."""
    _, fill, ink = _COLOURS[event.action.kind]
    y = row + _BAR - height  # all stages of a rank stand on one line
    left, width = scale.x(event.start_ns), scale.x(event.end_ns) - scale.x(event.start_ns)
    # Neighbours stay apart and corners round, but never so much that a short action vanishes.
    gap, corner = min(0.5, width / 8), min(3, width / 6)
    yield (
        f'<rect x="{left + gap:.2f}" y="{y}" width="{width - 2 * gap:.2f}" height="{height}" '
        f'rx="{corner:.2f}" fill="{fill}"><title>{_hint(event, scale)}</title></rect>'
    )
    inside = width * _recompute_share(event, scale)
    if inside:
        colour = _COLOURS[Kind.RECOMPUTE][1]
        yield (
            f'<rect x="{left + gap:.2f}" y="{y}" width="{max(inside - gap, 0):.2f}" '
            f'height="{height}" rx="{corner:.2f}" fill="{colour}" pointer-events="none"/>'
        )
    label = str(event.action.microbatch)
    room, middle = width - inside, left + (inside + width) / 2
    # A digit is about 0.62 of its size wide; where not even small ones fit, the hint shows it.
    size = next((size for size in (12, 9) if room >= 0.62 * size * len(label) + 2), None)
    if size is not None:
        base = y + (height + 0.7 * size) / 2
        # On hatching a number needs a light rim.
        rim = "#dfe9f7" if event.action.kind is Kind.RECOMPUTE else ""
        yield _text(middle, base, label, anchor="middle", colour=ink, size=size, rim=rim)


def _recompute_share(event: Event, scale: _Scale) -> float:
    # Regions are recomputed as part of a whole backward: a split one does not have any.
    is_backward = event.action.kind is Kind.BACKWARD
    return scale.recompute.get(event.action.stage, 0.0) if is_backward else 0.0


def _hint(event: Event, scale: _Scale) -> str:
    start, end = (time_ns / scale.unit_ns for time_ns in (event.start_ns, event.end_ns))
    return f"{event.action}: {start:.3f} to {end:.3f} {scale.unit}"


def _legend(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    used = {event.action.kind for row in timeline.events for event in row}
    if any(scale.recompute.values()):
        used.add(Kind.RECOMPUTE)
    x, y = _LEFT, scale.bottom + 38
    for name, fill, _ in (entry for kind, entry in _COLOURS.items() if kind in used):
        yield f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 18, y + 10, name, colour="#59636e")
        x += 40 + 7 * len(name)
    several = any(len({event.action.stage for event in row}) > 1 for row in timeline.events)
    lower = "; lower bars: the later stages of a rank" if several else ""
    yield _text(x, y + 10, f"numbers: microbatches{lower}", colour="#59636e")


def _text(
    x: float,
    y: float,
    text: str,
    *,
    colour: str,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    rim: str = "",
) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"'
    font = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    if rim:
        font += f' stroke="{rim}" stroke-width="3" paint-order="stroke"'
    return f"<text {place} {font}>{escape(text)}</text>"
