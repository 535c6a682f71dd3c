"""The command that compares two plans: `diff`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

import pipecompile
from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from tests.recorded_runs import recorded_run, recorded_step


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A plan of a model in two stages, and one in which another cut was asked for."""
    folder = tmp_path_factory.mktemp("plans")
    old, new = str(folder / "old.json"), str(folder / "new.json")
    options = ("-k", "2", "--microbatches", "2", "--costs", "roofline:cpu", "--no-self-check", "-o")
    target = f"{MODELS}:sequential"
    assert invoke("plan", target, *options, old).exit_code == 0
    # The last node of the first stage is to lie in the second.
    moved = read(old, Plan).stages[0].nodes[-1]
    assert invoke("plan", target, "--pin", f"{moved}=1", *options, new).exit_code == 0
    return old, new


def test_diff_as_text(files: tuple[str, str]) -> None:
    result = invoke("diff", *files)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    moved = read(files[0], Plan).stages[0].nodes[-1]
    assert lines[0].split() == ["step", "before", "after", "change"]
    assert lines.index("moved") < lines.index("options")
    assert f"  pin {moved}: none → 1" in lines
    assert any(line.endswith(": stage 0 → 1") for line in lines)
    assert max(map(len, lines)) <= 100


def test_diff_as_json(files: tuple[str, str]) -> None:
    result = invoke("diff", *files, "--format", "json")
    assert (result.exit_code, result.stderr) == (1, "")
    answer = json.loads(result.stdout)
    old, new = (read(path, Plan) for path in files)
    assert (answer["old"], answer["new"], answer["same"]) == (*files, False)
    assert (answer["notes"], answer["time_units"]) == ([], ["ns", "ns"])
    steps = {"before": old.prediction.step_ns, "after": new.prediction.step_ns}
    assert answer["changes"][0] == {"kind": "step", "where": "step", **steps}
    (moved,) = (change for change in answer["changes"] if change["kind"] == "move")
    assert (moved["before"], moved["after"]) == (0, 1)
    first = next(change for change in answer["changes"] if change["kind"] == "memory")
    total = old.prediction.memory[0].total
    assert (first["where"], first["before"]) == ("rank 0", [total.expected, total.bound])
    found = pipecompile.diff(old, new)
    assert [change["where"] for change in answer["changes"]] == [c.where for c in found.changes]


def test_diff_for_github(files: tuple[str, str]) -> None:
    result = invoke("diff", *files, "--format", "github")
    assert result.exit_code == 1
    # As of `check`: a workflow adds standard output to the page of the run, and reads the other.
    assert result.stdout.startswith(f"### {files[0]} → {files[1]}\n\n| step | before |")
    assert result.stderr.startswith(f"::notice file={files[1]}::the plan differs: ")
    assert result.stderr.count("\n") == 1
    assert "bubble" in result.stderr
    assert result.stderr.count("%") == result.stderr.count("%25")


@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_a_plan_is_the_same_as_itself_in_any_layout(
    files: tuple[str, str], tmp_path: Path, form: str
) -> None:
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads(Path(files[0]).read_text())))
    result = invoke("diff", files[0], str(again), "--format", form)
    assert result.exit_code == 0
    if form == "json":
        answer = json.loads(result.stdout)
        assert (answer["same"], answer["changes"]) == (True, [])
    else:
        assert result.stdout.endswith("the plans are the same\n")


def test_swapped_plans_have_swapped_values(files: tuple[str, str]) -> None:
    there, back = (
        json.loads(invoke("diff", *pair, "--format", "json").stdout)["changes"]
        for pair in (files, reversed(files))
    )
    kinds = {"step", "bubble", "memory", "load", "option"}
    swapped = [{**change, "before": change["after"], "after": change["before"]} for change in back]
    assert [change for change in there if change["kind"] in kinds] == [
        change for change in swapped if change["kind"] in kinds
    ]


def test_a_file_that_is_no_plan_is_an_error(files: tuple[str, str], tmp_path: Path) -> None:
    plan = read(files[0], Plan)
    run = tmp_path / "run.json"
    recorded_run(plan, recorded_step(plan)).save(run)
    newer = tmp_path / "newer.json"
    newer.write_text(Path(files[0]).read_text().replace("pipecompile/plan/1", "pipecompile/plan/2"))
    faults = {
        str(run): "is a run (pipecompile/run/1), but a plan is expected",
        str(newer): "written by a newer pipecompile than this one",
        str(tmp_path / "none.json"): "there is no such file",
    }
    for path, fault in faults.items():
        for arguments in ((path, files[0]), (files[0], path)):
            result = invoke("diff", *arguments)
            assert (result.exit_code, result.stdout) == (2, "")
            assert result.stderr.startswith(f"pipecompile: {path}: ")
            assert fault in result.stderr
    assert invoke("diff", files[0]).exit_code == 2


def test_plans_are_compared_as_their_files_have_them(
    files: tuple[str, str], tmp_path: Path
) -> None:
    edited = tmp_path / "edited.json"
    tree = json.loads(Path(files[0]).read_text())
    tree["prediction"]["step_ns"] *= 2
    edited.write_text(json.dumps(tree))
    result = invoke("diff", files[0], str(edited))
    # Whether a plan is sound is a question to `check`, which takes longer.
    assert (result.exit_code, result.stderr) == (1, "")
    assert "+100.0%" in result.stdout


def test_diff_imports_nothing_that_is_slow(files: tuple[str, str]) -> None:
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "slow = {'torch', 'ortools', 'networkx', 'rich', 'pipecompile.api.soundness'}\n"
        "try:\n    commands(['diff', *sys.argv[1:]])\nexcept SystemExit as end:\n"
        "    print(end.code, *slow & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True)
    assert done.stderr == "1\n"
