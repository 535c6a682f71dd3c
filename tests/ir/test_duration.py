from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.duration import parse_duration, time_text, time_with_unit


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


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1.5s", 1_500_000_000),
        ("120ms", 120_000_000),
        ("80us", 80_000),
        ("80 µs", 80_000),
        ("7ns", 7),
    ],
)
def test_times_are_read_as_they_are_written(text: str, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@pytest.mark.parametrize("nanoseconds", [1, 1500, 12_300_000, 3_000_000_000])
def test_a_time_is_printed_as_it_may_be_written(nanoseconds: int) -> None:
    assert parse_duration(time_text(nanoseconds)) == nanoseconds


@pytest.mark.parametrize("text", ["", "120", "ms", "1.5 min", "-1ms", "1e3ms"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"write 1\.5s, 120ms, 80us or 500ns"):
        parse_duration(text)
