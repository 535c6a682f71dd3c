from __future__ import annotations

import pytest

from pipecompile.report.units import (
    costs_text,
    gap_text,
    objective_label,
    objective_text,
    percent,
    variance_text,
)


@pytest.mark.parametrize(
    ("objective", "value", "text"),
    [
        ("variance", 0, "0 ns²"),
        ("variance", 1225, "1,225 ns²"),
        ("variance", 1_000_049, "1.0 µs²"),
        ("variance", 7 * 10**14, "700.0 ms²"),
        ("variance", 2 * 10**21, "2,000.0 s²"),
        ("max-load", 1500, "1.5 µs"),
        ("step-time", 12_340_000, "12.3 ms"),
    ],
)
def test_values_of_objectives_adapt_their_unit(objective: str, value: int, text: str) -> None:
    assert objective_text(objective, value) == text


@pytest.mark.parametrize(
    ("gap", "text"), [(0.0, "0.00%"), (1e-9, "<0.01%"), (0.0001, "0.01%"), (0.25, "25.00%")]
)
def test_a_small_gap_is_not_none(gap: float, text: str) -> None:
    assert gap_text(gap) == text


def test_squares_of_relative_times_have_their_unit() -> None:
    assert objective_text("variance", 41_400_000, "relative") == "41.4 M units²"
    assert objective_text("variance", 41, "relative") == "41 units²"
    assert objective_text("max-load", 3200, "relative") == "3.2 k units"


def test_the_variance_is_that_of_the_loads_and_not_their_sum_of_squares() -> None:
    # The mean is 35, and both deviate from it by 35.
    assert variance_text([0, 70]) == "1,225 ns²"
    assert variance_text([6430, 6500], "relative") == "1.2 k units²"
    assert variance_text([5, 5, 5]) == "0 ns²"
    assert objective_label("variance") == "variance: Σ load²"
    assert objective_label("max-load") == "max-load"


def test_only_relative_units_are_explained() -> None:
    assert costs_text("measured", "ns") == "measured; times are simulated from them"
    assert "relative units, not seconds" in costs_text("flops", "relative")


def test_a_share_of_nothing_is_empty() -> None:
    assert (percent(1, 8), percent(0, 8), percent(0, 0)) == ("12.5%", "0.0%", "")
