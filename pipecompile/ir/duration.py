"""Times as people read and write them: in the unit of time in which they read best, or in relative
units.
"""

from __future__ import annotations

import re

from pipecompile.errors import InputError
from pipecompile.ir.graph import TimeUnit

__all__ = ["parse_duration", "time_scale", "time_text", "time_with_unit"]

# From the largest unit on: the first one that a time reaches is the one it is written in.
_SECONDS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
_COUNTS = (("G", 1e9), ("M", 1e6), ("k", 1e3))
# As people type them: few keyboards have a µ.
_WRITTEN = {**dict(_SECONDS), "us": 1e3, "ns": 1.0}


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a time such as 120ms or 1.5s; InputError shows how to write it."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*", text)
    if match is None or match[2] not in _WRITTEN:
        raise InputError(f"{text!r} is not a time; write 1.5s, 120ms, 80us or 500ns")
    return round(float(match[1]) * _WRITTEN[match[2]])


def time_text(time_ns: float, unit: TimeUnit = "ns") -> str:
    """Return a time for a cell of a table: 1.5 ms, or 1.5 M of relative units."""
    name, scale = time_scale(time_ns, unit)
    # The smallest unit has no decimals: there is no half of a nanosecond, nor of a unit.
    return f"{time_ns / scale:.{int(scale > 1)}f} {name}".rstrip()


def time_scale(time_ns: float, unit: TimeUnit = "ns") -> tuple[str, float]:
    """Return the unit in which a time reads best, and how many ns (or relative units) it is."""
    scales = _COUNTS if unit == "relative" else _SECONDS
    smallest = ("", 1.0) if unit == "relative" else ("ns", 1.0)
    return next((pair for pair in scales if abs(time_ns) >= pair[1]), smallest)


def time_with_unit(time_ns: float, unit: TimeUnit = "ns") -> str:
    """Return a time for a sentence: 1.5 ms, or 1.5 M units."""
    return time_text(time_ns, unit) + " units" * (unit == "relative")
