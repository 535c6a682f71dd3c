"""The commands: what they print, write and answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS, ROOT

from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serde import decode, encode, read

UNET = f"{MODELS}:unet"
FORMATS = ("text", "json", "github")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the U-Net in four stages."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = invoke("plan", UNET, "-k", "4", "--costs", "flops", "-o", str(path))
    assert result.exit_code == 0, result.output
    return str(path)


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "3"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_second_plan_is_the_same_bytes_in_another_process(plan_file: str, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    result = fresh("-m", "pipecompile", "plan", UNET, "-k", "4", "--costs", "flops", "-o", str(again))
    assert result.returncode == 0, result.stderr
    assert again.read_bytes() == Path(plan_file).read_bytes()


def test_a_plan_says_nothing_of_the_machine_or_the_time(plan_file: str) -> None:
    text = Path(plan_file).read_text()
    assert str(ROOT) not in text
    assert read(plan_file, Plan).schema == "pipecompile/plan/1"
    assert decode(text.encode(), Plan, origin="test") == read(plan_file, Plan)
    assert encode(read(plan_file, Plan)) == text.encode()


def test_plan_prints_the_plan_and_tells_beside_it_what_made_it(tmp_path: Path) -> None:
    target = f"{MODELS}:sequential"
    result = invoke("plan", target, "-k", "2", "--costs", "flops", "--format", "json")
    assert result.exit_code == 0
    made = decode(result.stdout.encode(), Plan, origin="stdout")
    assert (made.k, made.verified) == (2, True)
    assert result.stderr.startswith("made with pipecompile ")


def test_options_reach_the_plan() -> None:
    result = invoke(
        *("plan", f"{MODELS}:sequential", "-k", "3", "--microbatches", "8", "--schedule", "gpipe"),
        *("--objective", "max-load", "--memory", "1GiB", "--recompute", "stage", "--costs", "flops"),
        *("--pin", "_4=-1", "--no-split", "1,2", "--format", "json"),
    )
    assert result.exit_code == 0, result.output
    made = decode(result.stdout.encode(), Plan, origin="stdout")
    options = made.options
    assert (options.k, options.microbatches, options.schedule, options.objective) == (3, 8, "gpipe", "max-load")
    assert (options.memory_bytes, options.recompute, options.costs) == (1 << 30, "stage", "flops")
    assert (options.pin, options.groups) == ({"_4": -1}, (("1", "2"),))
    assert made.assignment["_4"] == 2
    assert made.assignment["_1"] == made.assignment["_2"]


@pytest.mark.parametrize("form", FORMATS)
def test_show(plan_file: str, form: str) -> None:
    result = invoke("show", plan_file, "--format", form)
    assert result.exit_code == 0
    assert result.stderr == ""
    if form == "json":
        assert result.stdout.encode() == Path(plan_file).read_bytes()
    else:
        assert result.stdout.startswith("```\n") == (form == "github")
        assert "4 stages" in result.stdout
        assert "bubble" in result.stdout


@pytest.mark.parametrize("form", FORMATS)
def test_check_of_a_sound_plan(plan_file: str, form: str) -> None:
    result = invoke("check", plan_file, UNET, "--format", form)
    assert result.exit_code == 0, result.output
    if form == "json":
        assert json.loads(result.stdout) == {"plan": plan_file, "sound": True, "findings": []}
    else:
        assert result.stdout == {"text": "sound\n", "github": f"::notice file={plan_file}::sound\n"}[form]


@pytest.mark.parametrize("form", FORMATS)
def test_check_of_a_plan_over_its_limits(plan_file: str, form: str) -> None:
    limits = ("--max-imbalance", "1.0", "--max-bubble", "0.01", "--max-memory", "1KB")
    result = invoke("check", plan_file, *limits, "--format", form)
    assert result.exit_code == 1
    if form == "json":
        found = json.loads(result.stdout)
        assert not found["sound"]
        assert len(found["findings"]) == 6
    else:
        lines = result.stdout.splitlines()
        assert len(lines) == 6
        assert all(line.startswith("::error file=") == (form == "github") for line in lines)
        assert any("imbalance" in line for line in lines)
        assert any("bubble" in line for line in lines)
        assert any("rank 3 may need" in line for line in lines)


def test_check_finds_an_edited_plan(plan_file: str, tmp_path: Path) -> None:
    tree = json.loads(Path(plan_file).read_text())
    tree["prediction"]["step_ns"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    result = invoke("check", str(tmp_path / "plan.json"))
    assert result.exit_code == 1
    assert "the file was edited; plan again" in result.stdout


def test_check_finds_a_deadlock(plan_file: str, tmp_path: Path) -> None:
    tree = json.loads(Path(plan_file).read_text())
    tree["schedule"]["actions"][1].reverse()
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    result = invoke("check", str(tmp_path / "plan.json"))
    assert result.exit_code == 1
    assert result.stdout != "sound\n"


@pytest.mark.parametrize("form", FORMATS)
def test_simulate(plan_file: str, form: str, tmp_path: Path) -> None:
    trace, svg = tmp_path / "trace.json", tmp_path / "timeline.svg"
    result = invoke("simulate", plan_file, "--trace", str(trace), "--svg", str(svg), "--format", form)
    assert result.exit_code == 0
    made = read(plan_file, Plan)
    if form == "json":
        found = json.loads(result.stdout)
        assert found["makespan_ns"] == made.prediction.step_ns
        assert found["bubble"] == made.prediction.bubble
        assert len(found["idle"]) == 4
    else:
        assert result.stdout.startswith("```\nstep " if form == "github" else "step ")
    assert json.loads(trace.read_text())
    assert svg.read_text().startswith("<svg")


@pytest.mark.parametrize("form", FORMATS)
def test_verify(form: str) -> None:
    target = f"{MODELS}:sequential"
    result = invoke("verify", target, "-k", "3", "--microbatches", "4", "--costs", "flops", "--format", form)
    assert result.exit_code == 0, result.output
    if form == "json":
        found = json.loads(result.stdout)
        assert found["passed"]
        assert all(c["bit_equal"] == c["tensors"] and c["loss"] == c["loss_unsplit"] for c in found["comparisons"])
    else:
        assert "equal bit for bit" in result.stdout
        assert result.stdout.rstrip().endswith("equal\n```" if form == "github" else "equal")


def test_reading_a_plan_needs_no_torch(plan_file: str) -> None:
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "try:\n    commands([*sys.argv[1:]])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'ortools', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    for command in ("show", "check", "simulate"):
        result = fresh("-c", code, command, plan_file)
        assert result.returncode == 0, result.stderr
        assert result.stderr.strip() == "[]"
        assert result.stdout


def test_help_lists_the_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("plan", "show", "check", "simulate", "verify"))
