"""Times and values of objectives in the units in which they read best."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.graph import TimeUnit

__all__ = [
    "RELATIVE_NOTE",
    "costs_text",
    "gap_text",
    "objective_label",
    "objective_text",
    "percent",
    "square_text",
    "variance_text",
]

RELATIVE_NOTE = "relative units, not seconds (1 k is 1,000 units)"
# From the largest unit on: the first one that a value reaches is the one it is written in.
_SQUARES = (("s²", 1e18), ("ms²", 1e12), ("µs²", 1e6), ("ns²", 1.0))
_COUNTS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def costs_text(costs: str, unit: TimeUnit) -> str:
    """Return what times are made from, and once for a report what their unit is if not seconds."""
    if unit == "relative":
        return f"{costs}; times are {RELATIVE_NOTE}"
    return f"{costs}; times are simulated from them"


def objective_text(objective: str, value: int, unit: TimeUnit = "ns") -> str:
    """Return a value of an objective with its unit: for `variance` a sum of squared loads."""
    return square_text(value, unit) if objective == "variance" else time_with_unit(value, unit)


def objective_label(objective: str) -> str:
    """Return what the value of an objective is, as a reader may not guess it from the name."""
    # With a fixed total, the least sum of squares is the least variance: the search adds up whole
    # numbers, and leaves the subtraction of the mean out.
    return "variance: Σ load²" if objective == "variance" else objective


def variance_text(loads_ns: Sequence[int], unit: TimeUnit = "ns") -> str:
    """Return the mean squared deviation of loads from their mean: 1,225 ns² for 0 and 70 ns."""
    mean = sum(loads_ns) / len(loads_ns)
    return square_text(round(sum((load - mean) ** 2 for load in loads_ns) / len(loads_ns)), unit)


def square_text(value: int, unit: TimeUnit = "ns") -> str:
    """Return the square of a time, or a sum of squares, with its unit."""
    # A load of 1 ms has a square of 10¹² ns², which is 1 ms².
    scales = (*_COUNTS, ("", 1.0)) if unit == "relative" else _SQUARES
    name, scale = next((pair for pair in scales if value >= pair[1]), scales[-1])
    digits = f"{value / scale:,.{int(scale > 1)}f}"
    return " ".join(filter(None, [digits, name, "units²" * (unit == "relative")]))


def gap_text(gap: float) -> str:
    """Return a gap in percent; a small one is not printed as none."""
    return "<0.01%" if 0 < gap < 1e-4 else f"{gap:.2%}"


def percent(part: float, whole: float) -> str:
    """Return a part of the whole in percent; nothing if there is no whole."""
    return f"{part / whole:.1%}" if whole else ""
