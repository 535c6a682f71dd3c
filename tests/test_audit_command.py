"""The command that audits a layout: `audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

from pipecompile.cli import commands
from pipecompile.ir.audit import Audit
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.serialization import decode, read
from tests.report.pages import Page

TABLE = """\
part,forward_ms,backward_ms,parameters,saved
E,0.2,0.3,2GB,64MiB
attention*8,1,2,100MB,200MiB
mlp*8,2,4,200MB,300MiB
L,3,6,2GB,1GiB
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["audit", *arguments])


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "times.csv"
    path.write_text(TABLE)
    return str(path)


def test_audit_as_text_with_a_page(table: str, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    result = invoke(table, "--layout", "Et*4|t*4L", "--page", str(page), "--memory", "40GB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Et*4|t*4L (megatron)"
    assert lines[1].startswith("2 stages on 2 ranks, 1f1b, 2 microbatches; costs table:times.csv")
    assert lines[4].split()[:4] == ["layout", "45.0", "ms", "(rank"]
    assert [line[:19].strip() for line in lines[4:7]] == [
        "layout",
        "best between layers",
        "best inside layers",
    ]
    assert "rank 1 is the heaviest: 4 t + 1 L" in lines
    assert any(line.startswith("memory: rank 1 would run out first: up to") for line in lines)
    assert lines[-1].startswith("best inside layers (megatron-hybrid): *-*-")
    read = Page()
    read.feed(page.read_text())
    assert read.open == [] and "script" not in read.seen


def test_a_layout_over_its_cap_is_not_called_better_than_cuts_that_fit(table: str) -> None:
    caps = ("--memory", "6GB,16GB", "--recompute", "auto")
    result = invoke(table, "--layout", "Et*4|t*4L", *caps)
    assert result.exit_code == 0, result.output
    assert "the best cut between layers that fits has a heaviest rank" in result.stdout
    assert "-" not in result.stdout.split("that fits has a heaviest rank")[1].split("%")[0]
    assert "lighter heaviest rank than the layout" not in result.stdout
    # It is planned without the cap, so it is bounded by cuts without one.
    free = invoke(table, "--layout", "Et*4|t*4L", "--recompute", "auto")
    rows = [line.split() for line in (result.stdout + free.stdout).splitlines()]
    capped, uncapped = (row for row in rows if row[:1] == ["layout"])
    assert capped == uncapped
    assert "best between layers (megatron): Et" in result.stdout


def test_a_cut_as_heavy_with_a_shorter_step_is_given(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("part,forward_ms,backward_ms\nE,0.1,0.2\nt*6,1,2\nL,0.6,1.1\n")
    order = ("--schedule", "interleaved-1f1b", "--stages-per-rank", "2", "--microbatches", "4")
    result = invoke(str(path), "--layout", "Et|t|tt|ttL", *order)
    assert "the layout (proven); one as heavy has a step " in result.stdout
    assert "best between layers (megatron): " in result.stdout


def test_audit_as_json_and_for_github(table: str) -> None:
    layout = ("--layout", "Et*4|t*4L")
    audit = decode(invoke(table, *layout, "--format", "json").stdout_bytes, Audit, origin="json")
    assert (audit.hand.heaviest_ns, audit.k, audit.layers) == (45_000_000, 2, "layers.0-7")
    result = invoke(table, *layout, "--format", "github")
    assert result.stdout.startswith(f"### {table}: `Et*4|t*4L`")
    assert "| layout | 45.0 ms (rank 1) |" in result.stdout
    assert result.stderr.startswith(f"::notice file={table}::no cut between layers has")


def test_a_factory_is_captured_and_costed(tmp_path: Path) -> None:
    graph = str(tmp_path / "graph.json")
    target, costs = f"{MODELS}:sequential", ("--costs", "flops")
    profile = ("profile", target, *costs, "--microbatches", "2", "-o", graph)
    assert CliRunner().invoke(commands, list(profile)).exit_code == 0
    nodes = read(graph, CostGraph).nodes
    first = [f"%{node.name}" for node in nodes[: len(nodes) // 2]]
    second = [f"%{node.name}" for node in nodes[len(nodes) // 2 :]]
    layout = ("--layout", json.dumps([first, second]), "--format", "json")
    by_factory = invoke(target, *costs, *layout)
    assert by_factory.exit_code == 0, by_factory.output
    found = decode(by_factory.stdout_bytes, Audit, origin="json")
    same = decode(invoke(graph, *layout).stdout_bytes, Audit, origin="json")
    assert found.cuts == same.cuts and found.hand.heaviest_ns >= found.best[-1].heaviest_ns


def test_what_is_no_audit_is_an_error(table: str) -> None:
    assert "an audit is of a layout; give one: --layout LAYOUT" in invoke(table).stderr
    result = invoke(table, "--layout", "Et*4|t*5L")
    assert result.exit_code == 2 and "the layout has 9 layers" in result.stderr
    assert invoke(table, "--layout", "Et*4|t*4L", "--objective", "variance").exit_code == 2
