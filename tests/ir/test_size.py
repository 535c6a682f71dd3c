from __future__ import annotations

import pytest

from pipecompile.ir.size import option_text, parse_bytes, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (16 << 30, "16.0 GiB"),
        (-(3 << 19), "-1.5 MiB"),
    ],
)
def test_sizes_adapt_their_unit(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize("size", ["16GiB", "1.5MiB", "12KiB", "7B"])
def test_a_size_is_printed_as_it_may_be_written(size: str) -> None:
    assert parse_bytes(size_text(parse_bytes(size)).replace(" ", "")) == parse_bytes(size)


@pytest.mark.parametrize("size", ["16GB", "80GiB", "1536MiB", "1001B", "24KB"])
def test_a_size_for_an_option_is_exact_and_short(size: str) -> None:
    assert option_text(parse_bytes(size)) == size
    assert option_text(parse_bytes(size) + 1) == f"{parse_bytes(size) + 1}B"
