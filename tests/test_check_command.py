"""The command that checks plans: `check`, its limits, several plans, and a model that changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode, read

SEQUENTIAL = f"{MODELS}:sequential"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of a model in two stages, with times in seconds."""
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    options = ("-k", "2", "--microbatches", "4", "--costs", "roofline:cpu", "--no-self-check")
    assert invoke("plan", SEQUENTIAL, *options, "-o", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def edited_file(plan_file: str) -> str:
    path = Path(plan_file).with_name("edited.json")
    tree = json.loads(Path(plan_file).read_text())
    tree["prediction"]["step_ns"] += 1
    path.write_text(json.dumps(tree))
    return str(path)


def test_the_step_is_held_to_its_limit(plan_file: str) -> None:
    step = read(plan_file, Plan).prediction.step_ns
    assert invoke("check", plan_file, "--max-step", f"{step}ns").exit_code == 0
    result = invoke("check", plan_file, "--max-step", f"{step - 1}ns", "--format", "json")
    assert result.exit_code == 1
    (over,) = json.loads(result.stdout)["findings"]
    assert (over["code"], over["value"], over["limit"]) == ("step", step, step - 1)
    assert over["message"].endswith(" by 1 ns")


def test_a_share_is_written_with_a_percent_sign_or_without(plan_file: str) -> None:
    bubble = read(plan_file, Plan).prediction.bubble
    for text in (f"{bubble + 0.001:.4f}", f"{100 * bubble + 0.1:.2f}%"):
        assert invoke("check", plan_file, "--max-bubble", text).exit_code == 0
    for text in (f"{bubble - 0.001:.4f}", f"{100 * bubble - 0.1:.2f}%"):
        assert invoke("check", plan_file, "--max-bubble", text).exit_code == 1


def test_every_limit_is_a_line_with_its_value(plan_file: str) -> None:
    limits = ("--max-step", "1s", "--max-imbalance", "2", "--max-bubble", "90%")
    sizes = ("--max-memory", "1GiB", "--max-relayed", "1GiB", "--recompute", "none")
    result = invoke("check", plan_file, *limits, *sizes)
    assert result.exit_code == 0
    starts = ["sound", "step ", "imbalance ", "bubble ", "rank 0 may need ", "rank 1 may need "]
    starts += ["stages relay 0 B ", "recompute is 'none'"]
    lines = result.stdout.splitlines()
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"✓ {start}")


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_several_plans_are_checked_one_by_one(plan_file: str, edited_file: str, form: str) -> None:
    result = invoke("check", plan_file, edited_file, "--max-imbalance", "2", "--format", form)
    assert result.exit_code == 1
    if form == "json":
        answers = json.loads(result.stdout)
        assert [answer["plan"] for answer in answers] == [plan_file, edited_file]
        assert [answer["sound"] for answer in answers] == [True, False]
        return
    parts = result.stdout.partition("\n\n" if form == "text" else "### " + edited_file)
    assert ("✗" in parts[0], "✗" in parts[2]) == (False, True)
    if form == "text":
        assert [part.splitlines()[0] for part in (parts[0], parts[2])] == [plan_file, edited_file]
    else:
        levels = [line.partition("::the ")[0] for line in result.stderr.splitlines()]
        assert levels[-1] == f"::error file={edited_file}"
        assert result.stderr.startswith(f"::notice file={plan_file}::all 2 checks passed")


def test_a_changed_model_is_named_by_its_blocks(plan_file: str, tmp_path: Path) -> None:
    source = Path(MODELS).read_text()
    changed = tmp_path / "models.py"
    changed.write_text(source.replace("nn.ReLU(), nn.Dropout(0.1)", "nn.GELU(), nn.Dropout(0.1)"))
    result = invoke("check", plan_file, f"{changed}:sequential", "--format", "json")
    assert result.exit_code == 1
    stale, nodes = json.loads(result.stdout)["findings"]
    assert (stale["code"], nodes["code"], nodes["value"]) == ("stale", "nodes", 6)
    # Blocks of a plain nn.Sequential are its layers: each third one was a ReLU.
    assert nodes["message"] == "1, 4, …, 16 (6 blocks): each 1 of 1 node changed (_1)"


def test_a_drift_is_that_of_a_model(plan_file: str) -> None:
    result = invoke("check", plan_file, SEQUENTIAL, "--drift", "5%")
    assert result.exit_code == 0, result.output
    assert "✓ times are within 5.0% of the plan's" in result.stdout
    alone = invoke("check", plan_file, "--drift", "5%")
    assert alone.exit_code == 2
    assert "name the TARGET behind the plan" in alone.stderr


def test_a_limit_in_seconds_needs_a_plan_in_seconds(plan_file: str, tmp_path: Path) -> None:
    plan = read(plan_file, Plan)
    tree = json.loads(encode(plan)) | {"time_unit": "relative"}
    relative = tmp_path / "relative.json"
    relative.write_text(json.dumps(tree))
    result = invoke("check", str(relative), "--max-step", "1s")
    assert result.exit_code == 2
    assert "are relative units; limit the bubble, or plan with costs in seconds" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--max-step", "fast"], "'fast' is not a time; write 1.5s, 120ms"),
        (["--max-bubble", "a fifth"], "'a fifth' is not a share; write 5%"),
        (["--max-bubble", "120%"], "a share of the step from 0 to 1"),
        (["--max-relayed", "much"], "'much' is not a size; write 16GiB"),
        (["none.json"], "none.json: there is no such file"),
        (["nets"], "'nets' is not a target; write package.module:factory"),
        ([f"{MODELS}:nothing"], "nothing"),
    ],
)
def test_a_mistake_is_named(plan_file: str, arguments: list[str], fault: str) -> None:
    result = invoke("check", plan_file, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("pipecompile: ")
    assert fault in result.stderr
