"""The commands that read a recorded run: `compare`, and `calibrate --run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

from pipecompile.cli import commands
from pipecompile.cost_models.device import Device, load_device
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from tests.recorded_runs import recorded_run, recorded_step


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A plan, and a run of it whose forwards and backwards took twice as long."""
    folder = tmp_path_factory.mktemp("run")
    path = str(folder / "plan.json")
    options = (
        "-k",
        "2",
        "--microbatches",
        "2",
        "--costs",
        "roofline:cpu",
        "--no-self-check",
        "-o",
        path,
    )
    assert invoke("plan", f"{MODELS}:sequential", *options).exit_code == 0
    plan = read(path, Plan)
    step = recorded_step(plan, forward=2, backward=2, peak_bytes=1 << 20)
    recorded_run(plan, step).save(folder / "run.json")
    return path, str(folder / "run.json")


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_compare(files: tuple[str, str], form: str) -> None:
    result = invoke("compare", *files, "--format", form)
    assert (result.exit_code, result.stderr) == (0, "")
    if form == "json":
        figures = json.loads(result.stdout)
        assert (figures["compares"], figures["steps"], figures["in_turns"]) == ("times", 1, False)
        assert {kind["ratio"] for kind in figures["kinds"].values()} == {2.0}
        assert figures["ranks"][0]["peak_bytes"] == 1 << 20
    else:
        assert result.stdout.startswith("```\n") == (form == "github")
        assert "the actions farthest from their prediction" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 110


def test_compare_writes_a_page_and_a_trace(files: tuple[str, str], tmp_path: Path) -> None:
    page, trace = tmp_path / "run.html", tmp_path / "trace.json"
    result = invoke("compare", *files, "--page", str(page), "--trace", str(trace))
    assert result.exit_code == 0
    assert f"wrote {page}: open it in a browser" in result.stderr.splitlines()
    assert page.read_text().count("<svg") == 2
    assert json.loads(trace.read_text())["traceEvents"]


def test_view_shows_a_run_and_another_plan(files: tuple[str, str], tmp_path: Path) -> None:
    page, other = tmp_path / "plan.html", tmp_path / "other.json"
    plan = read(files[0], Plan)
    msgspec.structs.replace(plan, capture=msgspec.structs.replace(plan.capture, model="A")).save(
        other
    )
    options = ("--run", files[1], "--against", str(other), "-o", str(page))
    result = invoke("view", files[0], *options)
    assert (result.exit_code, result.stderr) == (0, f"wrote {page}: open it in a browser\n")
    assert "<h2>Predicted and measured</h2>" in page.read_text()
    assert "<h2>Against other.json</h2>" in page.read_text()
    refused = invoke("view", str(other), "--run", files[1], "-o", str(page))
    assert refused.exit_code == 2
    assert "the run was recorded of another plan" in refused.stderr


def test_a_run_of_another_plan_is_an_error(files: tuple[str, str], tmp_path: Path) -> None:
    plan = read(files[0], Plan)
    other = tmp_path / "other.json"
    msgspec.structs.replace(plan, time_unit="relative").save(other)
    result = invoke("compare", str(other), files[1])
    assert result.exit_code == 2
    assert "the run was recorded of another plan" in result.stderr
    swapped = invoke("compare", files[1], files[0])
    assert swapped.exit_code == 2
    assert "is a run (pipecompile/run/1), but a plan is expected" in swapped.stderr


def test_neither_command_needs_torch(files: tuple[str, str]) -> None:
    for command in (["compare"], ["calibrate", "--run"]):
        code = (
            "import sys\nfrom pipecompile.cli import commands\n"
            "try:\n    commands([*sys.argv[1:]])\nexcept SystemExit as end:\n"
            "    print(end.code, 'torch' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *command, *files], capture_output=True, text=True
        )
        assert done.stderr == "0 False\n"


def test_a_device_is_corrected_by_a_run(files: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "device.json"
    result = invoke("calibrate", "--run", *files, "-o", str(output))
    assert result.exit_code == 0
    assert result.stdout == "measured / predicted: all compute 2.00, forward 2.00, backward 2.00\n"
    before, device = load_device("cpu"), read(output, Device)
    assert device.bandwidth_bytes_per_s == before.bandwidth_bytes_per_s / 2
    assert device.launch_ns == before.launch_ns * 2
    assert device.peak_flop_per_s["float32"] == before.peak_flop_per_s["float32"] / 2
    assert json.loads(invoke("calibrate", "--run", *files, "--format", "json").stdout)
