from __future__ import annotations

import pytest

from pipecompile.ir.duration import time_text, time_with_unit


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1500, "1.5 µs"),
        (12_340_000, "12.3 ms"),
        (3_000_000_000, "3.0 s"),
    ],
)
def test_times_adapt_their_unit(nanoseconds: int, text: str) -> None:
    assert time_text(nanoseconds) == text


@pytest.mark.parametrize(
    ("units", "text"),
    [(0, "0"), (999, "999"), (30_700, "30.7 k"), (12_340_000, "12.3 M"), (3 * 10**12, "3000.0 G")],
)
def test_relative_times_have_no_seconds(units: int, text: str) -> None:
    assert time_text(units, "relative") == text
    assert time_with_unit(units, "relative") == f"{text} units"
    assert time_with_unit(1500, "ns") == "1.5 µs"
