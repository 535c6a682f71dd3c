from __future__ import annotations

import json
from difflib import unified_diff
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.layout import layout

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=40)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=60,
)


def _changed(before: Any, after: Any) -> int:
    """Lines of a diff that begin with + or −."""
    lines = unified_diff(layout(before).split("\n"), layout(after).split("\n"), n=0, lineterm="")
    return sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in lines)


@given(VALUES)
def test_what_is_laid_out_reads_as_it_was(value: Any) -> None:
    assert json.loads(layout(value)) == value


def test_what_fits_in_a_hundred_columns_is_one_line() -> None:
    assert (
        layout({"b": [1, 2.5, None], "a": {"c": "d"}}) == '{"b": [1, 2.5, null], "a": {"c": "d"}}'
    )
    row = ["x" * 9] * 7
    assert "\n" not in layout(row) and len(layout(row)) == 91
    assert layout([*row, "y" * 6]).split("\n")[0] == "["


def test_the_schema_comes_first() -> None:
    value = {"a": 1, "schema": "s", "z": {"b": 2, "schema": "t"}}
    assert layout(value) == '{"schema": "s", "a": 1, "z": {"schema": "t", "b": 2}}'


def test_scalars_fill_lines_and_rows_of_a_table_have_a_line_each() -> None:
    table = [{"bytes": 10**6 + index, "name": f"parameter {index}"} for index in range(4)]
    lines = layout({"numbers": list(range(10**4, 10**4 + 30)), "table": table}).split("\n")
    assert lines[:3] == [
        "{",
        ' "numbers": [',
        f"  {', '.join(map(str, range(10**4, 10**4 + 14)))},",
    ]
    assert lines[6:] == [
        ' "table": [',
        *(
            f'  {{"bytes": {10**6 + index}, "name": "parameter {index}"}}' + "," * (index < 3)
            for index in range(4)
        ),
        " ]",
        "}",
    ]


def test_keys_fill_lines_and_what_is_long_has_lines_of_its_own() -> None:
    row = {"a": "a" * 50, "b": "b" * 50, "c": "c" * 30, "d": [10**9] * 9, "e": 1, "f": 2}
    assert layout([row]).split("\n") == [
        "[",
        " {",
        f'  "a": "{"a" * 50}",',
        f'  "b": "{"b" * 50}", "c": "{"c" * 30}",',
        '  "d": [',
        f"   {', '.join(['1000000000'] * 8)},",
        "   1000000000",
        "  ],",
        '  "e": 1, "f": 2',
        " }",
        "]",
    ]


def test_the_keys_of_the_file_have_a_line_each() -> None:
    assert layout({"a": "a" * 90, "b": 1, "c": 2}).split("\n")[2:] == [' "b": 1,', ' "c": 2', "}"]


@given(st.lists(st.text("ab.", max_size=20) | st.integers(0, 10**9), min_size=30))
def test_lines_have_at_most_a_hundred_columns(items: list[Any]) -> None:
    text = layout({"items": items, "rows": [{"items": items[:9]}, items], "z": {"items": items}})
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.parametrize("position", [0, 7, 99])
def test_names_that_enter_or_leave_a_block_change_only_its_lines(position: int) -> None:
    names = [f"model.{layer}.{part}" for layer in range(10) for part in ("query", "key", "value")]
    assert _changed(names, [name for name in names if name != f"model.{position}.key"]) <= 2
