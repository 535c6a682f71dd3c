"""The page of formats: its files are read, and its table of a plan has every field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from pipecompile.ir.finding import Code
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.ir.serialization import decode, encode
from pipecompile.report.plan_diff import ChangeKind

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "formats.md").read_text()


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Cost graph", CostGraph),
        ("Schedule problem", ScheduleProblem),
        ("Links", Links),
        ("Recorded run", RecordedRun),
    ],
)
def test_the_file_of_a_section_is_read_and_written_with_its_schema_first(
    heading: str, kind: type[Any]
) -> None:
    block = re.search(r"```json\n(.*?)```", section(heading), re.DOTALL)
    assert block is not None
    value = decode(block[1].encode(), kind, origin="formats.md")
    assert encode(value).startswith(b'{\n "schema": "pipecompile/')


def test_the_table_of_a_plan_has_all_fields() -> None:
    rows = [line for line in section("Plan").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(Plan.__struct_fields__) - {"schema"}


def test_the_table_of_changes_has_all_kinds_in_their_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ", section("Result of `diff`"), re.MULTILINE)
    assert tuple(rows[1:]) == get_args(ChangeKind)


def test_the_table_of_findings_has_all_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ", section("Result of `check`"), re.MULTILINE)
    assert tuple(rows[1:]) == get_args(Code)
