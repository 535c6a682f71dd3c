"""The settings that a joint search planned, as points in a chart of memory and time.

One that no other beats in both is on the Pareto front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from pipecompile.ir.duration import time_scale, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.plan import Plan
from pipecompile.ir.setting import SettingResult
from pipecompile.ir.size import size_scale, size_text
from pipecompile.report.joint import settings_rows, word_columns
from pipecompile.report.svg import round_step

__all__ = ["FrontChart", "front_chart"]

# Percent of the picture's width and height; axes and their labels have the rest.
_LEFT, _RIGHT, _TOP, _BOTTOM = 15.0, 95.0, 8.0, 80.0
_TICKS = 4  # about as many on each axis


@dataclass(frozen=True)
class _Axis:
    """From values to places in percent of the picture: `low` is at `start`, `high` at `stop`.

    Values are written in the unit `name`, of `scale` bytes or ns each.
    """

    low: float
    high: float
    start: float
    stop: float
    name: str
    scale: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 2)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield places and texts of round values."""
        # In the unit that is written: ticks at 1.5 and 2 GiB, and not at round numbers of bytes.
        step = round_step((self.high - self.low) / _TICKS / self.scale)
        # 0.2 and 0.5 need one digit, 0.05 two.
        digits = max(0, -floor(log10(step)))
        first, last = (value / self.scale / step for value in (self.low, self.high))
        for index in range(ceil(first), floor(last) + 1):
            text = f"{index * step:,.{digits}f} {self.name}".rstrip()
            yield self.at(index * step * self.scale), text


def _axis(values: Sequence[int], start: float, stop: float, unit: tuple[str, float]) -> _Axis:
    """Return an axis on which the values have some room around them."""
    low, high = min(values), max(values)
    # At least one percent, since all points may have the same value: an axis needs a length.
    room = max(0.08 * (high - low), 0.01 * high, 1)
    return _Axis(max(low - room, 0), high + room, start, stop, *unit)


@dataclass(frozen=True)
class _SettingPoint:
    """Settings at their place; `text` is the number of the first one in the table of settings."""

    text: str
    x: float
    y: float
    is_on_front: bool
    hint: str


@dataclass(frozen=True)
class FrontChart:
    """What is drawn: points, the first one the plan's; the lines of the front; ticks of both axes,
    each its place and its text; the rows of the table, the first one the header, in whose columns
    `words` are no numbers.
    """

    points: Sequence[_SettingPoint]
    lines: Sequence[tuple[float, float, float, float]]
    memory_ticks: Sequence[tuple[float, str]]
    time_ticks: Sequence[tuple[float, str]]
    rows: Sequence[Sequence[str]]
    words: Sequence[int]


def front_chart(plan: Plan) -> FrontChart | None:
    """Return the chart of the settings that a plan lists; None if it lists fewer than two."""
    if plan.joint is None or len(plan.joint.best) < 2:
        return None
    results, unit = plan.joint.best, plan.time_unit
    steps, sizes = ([value[index] for value in map(_values, results)] for index in (0, 1))
    # From the bottom up, since pictures count from the top: a long step is high.
    time = _axis(steps, _BOTTOM, _TOP, time_scale(max(steps), unit))
    memory = _axis(sizes, _LEFT, _RIGHT, size_scale(max(sizes)))
    points = list(_points(results, memory, time, unit))
    header, *body = settings_rows(plan.joint, unit)
    rows = [("", *header), *((str(number), *row) for number, row in enumerate(body, 1))]
    return FrontChart(
        points,
        [(*one, *other) for one, other in pairwise(_front(points))],
        list(memory.ticks()),
        list(time.ticks()),
        rows,
        word_columns(rows[0]),
    )


def _points(
    results: Sequence[SettingResult], memory: _Axis, time: _Axis, unit: TimeUnit
) -> Iterator[_SettingPoint]:
    """Yield the places of results, each once: settings may have the same step and memory."""
    # Settings 2 and 5 with the same step and memory are one point, "2+", whose hint names both.
    numbers: dict[tuple[int, int], list[int]] = {}
    for number, result in enumerate(results, 1):
        numbers.setdefault(_values(result), []).append(number)
    for (step, held), own in numbers.items():
        names = (f"{number}: {results[number - 1].setting}" for number in own)
        yield _SettingPoint(
            text=f"{own[0]}+" if len(own) > 1 else str(own[0]),
            x=memory.at(held),
            y=time.at(step),
            is_on_front=not any(_beats(other, (step, held)) for other in numbers),
            hint="\n".join([f"{time_with_unit(step, unit)}, {size_text(held)}", *names]),
        )


def _values(result: SettingResult) -> tuple[int, int]:
    """Return the step in ns, and what the fullest rank may need in bytes."""
    assert result.memory_bytes is not None
    assert result.step_ns is not None
    return result.step_ns, result.memory_bytes


def _beats(other: tuple[int, int], value: tuple[int, int]) -> bool:
    """Return whether another point is no worse in either respect, and better in one."""
    # (10 ms, 4 GiB) beats (12 ms, 4 GiB), and neither beats (8 ms, 6 GiB) nor is beaten by it.
    return other != value and other[0] <= value[0] and other[1] <= value[1]


def _front(points: Sequence[_SettingPoint]) -> Iterator[tuple[float, float]]:
    """Yield the corners of the front, as stairs: to have a shorter step a rank needs all of the
    memory of the next point.
    """
    places = sorted({(point.x, point.y) for point in points if point.is_on_front})
    yield from places[:1]
    for (_, above), (x, y) in pairwise(places):
        # From the left: with more memory, still the step of the point before; then down to the
        # new one.
        yield x, above
        yield x, y
