"""Times and values of objectives in the units in which they read best."""

from __future__ import annotations

from pipecompile.ir.graph import TimeUnit

__all__ = [
    "RELATIVE_NOTE",
    "costs_text",
    "gap_text",
    "objective_text",
    "percent",
    "time_scale",
    "time_text",
    "time_with_unit",
]

RELATIVE_NOTE = "relative units, not seconds (1 k is 1,000 units)"
# From the largest unit on: the first one that a value reaches is the one it is written in.
_SECONDS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
_SQUARES = (("s²", 1e18), ("ms²", 1e12), ("µs²", 1e6))
_COUNTS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def time_text(time_ns: float, unit: TimeUnit = "ns") -> str:
    """Return a time for a cell of a table: 1.5 ms, or 1.5 M of relative units."""
    name, scale = time_scale(time_ns, unit)
    # The smallest unit has no decimals: there is no half of a nanosecond, nor of a unit.
    return f"{time_ns / scale:.{int(scale > 1)}f} {name}".rstrip()


def time_scale(time_ns: float, unit: TimeUnit = "ns") -> tuple[str, float]:
    """Return the unit in which a time reads best, and how many ns (or relative units) it is."""
    # T is for squares only.
    scales = _COUNTS[1:] if unit == "relative" else _SECONDS
    smallest = ("", 1.0) if unit == "relative" else ("ns", 1.0)
    return next((pair for pair in scales if abs(time_ns) >= pair[1]), smallest)


def time_with_unit(time_ns: float, unit: TimeUnit = "ns") -> str:
    """Return a time for a sentence: 1.5 ms, or 1.5 M units."""
    return time_text(time_ns, unit) + " units" * (unit == "relative")


def costs_text(costs: str, unit: TimeUnit) -> str:
    """Return what times are made from, and once for a report what their unit is if not seconds."""
    if unit == "relative":
        return f"{costs}; times are {RELATIVE_NOTE}"
    return f"{costs}; times are simulated from them"


def objective_text(objective: str, value: int, unit: TimeUnit = "ns") -> str:
    """Return a value of an objective with its unit, which is a square for `variance`."""
    # A load of 1 ms has a square of 10¹² ns², which is 1 ms².
    if objective != "variance":
        return time_with_unit(value, unit)
    if unit == "relative":
        name, scale = next((pair for pair in _COUNTS if value >= pair[1]), ("", 1))
        return f"{value / scale:,.1f} {name} units²".replace("  ", " ")
    name, scale = next((pair for pair in _SQUARES if value >= pair[1]), _SQUARES[-1])
    return f"{value / scale:,.1f} {name}"


def gap_text(gap: float) -> str:
    """Return a gap in percent; a small one is not printed as none."""
    return "<0.01%" if 0 < gap < 1e-4 else f"{gap:.2%}"


def percent(part: float, whole: float) -> str:
    """Return a part of the whole in percent; nothing if there is no whole."""
    return f"{part / whole:.1%}" if whole else ""
