"""The names on the command line of a benchmark."""

from __future__ import annotations

import pytest

from benchmarks.command_line import checked_names, parser_of


def test_no_name_stands_for_all_and_unknown_ones_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, known = parser_of("A benchmark."), ["gpt2", "llama"]
    parser.add_argument("names", nargs="*")
    assert checked_names(parser, parser.parse_args([]).names, "model", known) == []
    assert checked_names(parser, parser.parse_args(["llama"]).names, "model", known) == ["llama"]
    with pytest.raises(SystemExit) as ended:
        checked_names(parser, parser.parse_args(["lama"]).names, "model", known)
    assert ended.value.code == 2
    assert "llama" in capsys.readouterr().err
