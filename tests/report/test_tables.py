from __future__ import annotations

import re

import pytest

from pipecompile.report.tables import bar, plain_table, terminal_table

ROWS = [["name", "size"], ["a long name of a module", "1.5 MiB"], ["b", "12 B"]]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert list(plain_table(ROWS, {0})) == [
        "name                       size",
        "a long name of a module 1.5 MiB",
        "b                          12 B",
    ]


def test_a_terminal_has_a_header_in_bold_and_a_rule() -> None:
    header, rule, *rows = terminal_table(ROWS, {0})
    assert "\x1b[1m" in header and set(rule) == {" ", "─"}
    assert [row.split() for row in rows] == [row.split() for row in plain_table(ROWS, {0})][1:]


def test_in_a_narrow_terminal_words_wrap_and_numbers_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in terminal_table(ROWS, {0})]
    assert max(map(len, lines)) <= 24
    assert any("1.5 MiB" in line for line in lines) and len(lines) > len(ROWS) + 1


@pytest.mark.parametrize(
    ("part", "text"), [(0, "    "), (0.5, "██  "), (1 / 32, "▏   "), (1, "████")]
)
def test_a_bar_is_filled_to_an_eighth_of_a_column(part: float, text: str) -> None:
    assert bar(part, 4) == text
