"""Losses of several runs as a picture (SVG), and below them how far they are from those of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

# In pixels: two panels of equal width, one above the other.
WIDTH, LEFT, RIGHT = 1000, 76, 24
UPPER, LOWER = (70, 330), (390, 540)  # where they begin and end
HEIGHT = 606
INK, PALE, LINE = "#1f2328", "#59636e", "#e4e4e1"
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step. `end` is what happened to it after the last one, if anything.

    Only where `is_drawn` are losses in the upper panel.
    """

    name: str
    losses: Mapping[int, float]
    colour: str
    width: float = 2.0
    end: str = ""
    is_drawn: bool = True


def loss_figure(
    title: str, reference: Curve, others: list[Curve], *, tolerance: float, checkpoint: int
) -> str:
    """Return a self-contained SVG: the losses, and differences from `reference` on a logarithmic
    scale. A vertical line marks the step before which the checkpoint was saved.
    """
    last = max(reference.losses)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    body = [
        _text(20, 32, title, size=16, weight=600),
        *_checkpoint(x(checkpoint)),
        *_losses([reference, *others], x),
        *_differences(reference, others, x, tolerance),
        *_steps(last, x),
        *_legend([reference, *others]),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fbfbfa" stroke="#d9d9d6"/>',
            *body,
            "</svg>\n",
        ]
    )


def _checkpoint(x: float) -> Iterator[str]:
    yield (
        f'<line x1="{x:.1f}" y1="{UPPER[0]}" x2="{x:.1f}" y2="{LOWER[1]}" stroke="{PALE}" '
        'stroke-dasharray="4 4"/>'
    )
    yield _text(x - 6, UPPER[0] + 12, "checkpoint", anchor="end", colour=PALE)


def _losses(curves: list[Curve], x: Callable[[float], float]) -> Iterator[str]:
    drawn = [curve for curve in curves if curve.is_drawn]
    values = [loss for curve in drawn for loss in curve.losses.values()]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2

    def y(loss: float) -> float:
        return _between(UPPER, (loss - low) / (high - low))

    yield _text(20, UPPER[0] - 10, "loss, nats for a byte", colour=PALE)
    for index in range(round(2 * (high - low)) + 1):
        yield from _level(y(low + index / 2), f"{low + index / 2:.1f}")
    for curve in drawn:
        points = [(x(step), y(loss)) for step, loss in sorted(curve.losses.items())]
        yield _line(points, curve)
        if curve.end:
            yield from _cross(*points[-1], curve)


def _differences(
    reference: Curve, others: list[Curve], x: Callable[[float], float], tolerance: float
) -> Iterator[str]:
    """Differences of a power of ten and less, down to one in 10⁶, where smaller ones lie too."""
    low, high = -6, math.ceil(math.log10(tolerance))

    def y(difference: float) -> float:
        power = math.log10(max(difference, 10.0**low))
        return _between(LOWER, (min(power, high) - low) / (high - low))

    yield _text(20, LOWER[0] - 10, "distance from the plain loop", colour=PALE)
    for power in range(low, high + 1, 2):
        yield from _level(y(10.0**power), f"10{_superscript(power)}")
    limit = y(tolerance)
    yield (
        f'<line x1="{LEFT}" y1="{limit:.1f}" x2="{WIDTH - RIGHT}" y2="{limit:.1f}" '
        'stroke="#b3261e" stroke-dasharray="6 3"/>'
    )
    yield _text(WIDTH - RIGHT - 4, limit - 5, "tolerance", anchor="end", colour="#b3261e")
    for curve in others:
        distances = {
            step: abs(loss - reference.losses[step]) for step, loss in curve.losses.items()
        }
        yield _line([(x(step), y(value)) for step, value in sorted(distances.items())], curve)


def _steps(last: int, x: Callable[[float], float]) -> Iterator[str]:
    """Yield numbers of steps below the panels, about ten."""
    for step in range(0, last + 1, max(round((last + 1) / 10), 1)):
        yield _text(x(step), LOWER[1] + 18, str(step), anchor="middle", colour=PALE)
    yield _text(20, LOWER[1] + 18, "step", colour=PALE)


def _legend(curves: list[Curve]) -> Iterator[str]:
    x, y = LEFT, LOWER[1] + 44
    for curve in curves:
        name = f"{curve.name}, {curve.end}" if curve.end else curve.name
        yield _line([(x, y - 4), (x + 20, y - 4)], curve)
        yield _text(x + 26, y, name, colour=PALE)
        x += 50 + round(6.3 * len(name))


def _level(y: float, label: str) -> Iterator[str]:
    yield (f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{LINE}"/>')
    yield _text(LEFT - 8, y + 4, label, anchor="end", colour=PALE)


def _cross(x: float, y: float, curve: Curve) -> Iterator[str]:
    """Yield where a run was killed."""
    for slope in (1, -1):
        yield _line([(x - 6, y - 6 * slope), (x + 6, y + 6 * slope)], curve)
    yield _text(x, y - 18, curve.end, colour=curve.colour, weight=600, anchor="middle")


def _line(points: list[Point], curve: Curve) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{curve.colour}" '
        f'stroke-width="{curve.width}" stroke-linejoin="round"/>'
    )


def _between(panel: tuple[int, int], share: float) -> float:
    top, bottom = panel
    return bottom - (bottom - top) * share


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: int = 400,
    colour: str = INK,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
