"""The picture of losses under schedules that never empty the pipeline.

    python docs/images/make_losses.py

It draws what `python -m benchmarks.delayed_losses` has found: moving averages of losses, on the
left by minibatch and on the right by time. Writes docs/images/delayed-losses.svg.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "delayed_losses.json"
PICTURE = Path(__file__).with_name("delayed-losses.svg")

WIDTH, HEIGHT, TOP, BOTTOM = 1000, 352, 76, 296
PANELS = ((60, 490), (550, 980))  # where they begin and end, in pixels
INK, PALE, LINE = "#1f2328", "#59636e", "#e4e4e1"
COLOURS = {"1f1b": "#59636e", "pipedream-2bw": "#d2741f", "pipedream": "#4f83cc"}
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
AVERAGED = 15  # minibatches

Point = tuple[float, float]


def main() -> None:
    """Draw both panels to one scale of losses."""
    found = json.loads(RESULT.read_text())
    lengths = {row["schedule"]: row["minibatch"] for row in found["rows"]}
    losses = {
        name: averaged(list(map(mean, zip(*by_seed, strict=True))))
        for name, by_seed in found["losses"].items()
    }
    by_data = {name: list(enumerate(values, AVERAGED)) for name, values in losses.items()}
    by_time = {
        name: [(number * lengths[name], loss) for number, loss in points]
        for name, points in by_data.items()
    }
    text = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" font-size="12" role="img">',
            "<title>Losses of a small GPT-2 under 1F1B, PipeDream-2BW and PipeDream</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fbfbfa" stroke="#d9d9d6"/>',
            label(20, 32, "A small GPT-2 on 4 ranks: loss, nats for a byte", size=16, weight=600),
            *panel(PANELS[0], by_data, "minibatches"),
            *panel(PANELS[1], by_time, "time, in minibatches of 1f1b"),
            *legend(),
            "</svg>\n",
        ]
    )
    PICTURE.write_text(text)
    print(f"wrote {PICTURE}")


def averaged(losses: Sequence[float]) -> list[float]:
    """Return the means of so many losses in a row."""
    sums = list(accumulate(losses, initial=0.0))
    return [(b - a) / AVERAGED for a, b in zip(sums, sums[AVERAGED:], strict=False)]


def panel(
    sides: tuple[int, int], curves: dict[str, list[tuple[float, float]]], unit: str
) -> Iterator[str]:
    """Yield the curves of one panel, between the lowest loss of all and the highest."""
    left, right = sides
    points = [point for curve in curves.values() for point in curve]
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points) - 0.1, max(y for _, y in points)

    def at(point: tuple[float, float]) -> Point:
        x, y = point
        return left + (right - left) * x / last, BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low)

    for half in range(int(2 * low) + 1, int(2 * high) + 1):
        _, y = at((0, half / 2))
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{LINE}"/>'
        yield label(left - 8, y + 4, f"{half / 2:.1f}", anchor="end", colour=PALE)
    for tick in range(0, int(last) + 1, 50):
        yield label(at((tick, low))[0], BOTTOM + 18, str(tick), anchor="middle", colour=PALE)
    yield label((left + right) / 2, BOTTOM + 38, unit, anchor="middle", colour=PALE)
    for name, curve in curves.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, curve))
        yield (
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )


def legend() -> Iterator[str]:
    """Yield the names of the curves in their colours."""
    x = PANELS[0][0]
    for name, colour in COLOURS.items():
        yield f'<line x1="{x}" y1="54" x2="{x + 20}" y2="54" stroke="{colour}" stroke-width="3"/>'
        yield label(x + 26, 58, name, colour=PALE)
        x += 60 + 7 * len(name)


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: int = 400,
    colour: str = INK,
    anchor: str = "start",
) -> str:
    """Return text at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}" text-anchor="{anchor}">{text}</text>'
    )


if __name__ == "__main__":
    main()
