"""The command that says why a step is as long as it is: `explain`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

import pipecompile
from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from pipecompile.report.plan_facts import outcome_of

TARGET = f"{MODELS}:mlp"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


def planned(folder: Path, name: str, *options: str) -> str:
    """Return the file of a plan of the target with these options."""
    path = str(folder / f"{name}.json")
    given = ("-k", "2", "--microbatches", "4", "--costs", "roofline:a100", "--no-self-check")
    assert invoke("plan", TARGET, *given, *options, "-o", path, "-q").exit_code == 0
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def plan(folder: Path) -> str:
    """A plan whose groups and pins hold it."""
    groups = ("--no-split", "0,1,2", "--no-split", "2,3", "--no-split", "12,_13")
    return planned(folder, "plan", *groups, "--pin", "_6=1", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def costs(folder: Path) -> str:
    """The cost graph of the same microbatches."""
    path = str(folder / "costs.json")
    options = ("--microbatches", "4", "--costs", "roofline:a100", "--no-self-check", "-q")
    assert invoke("profile", TARGET, *options, "-o", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def answer(plan: str) -> dict[str, Any]:
    """The explanation of the plan by its model."""
    return json.loads(invoke("explain", plan, TARGET, "--format", "json").stdout)


def test_without_a_target_the_command_to_go_on_with_is_last(plan: str) -> None:
    result = invoke("explain", plan)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    step, rest = lines[0].split(", bubble ")
    assert step.startswith("step ") and rest.endswith("%")
    assert lines[-1] == f"  pipecompile explain {plan} models.py:mlp"
    assert "why it is not lighter" in lines and "what would change it" not in lines
    assert any("may hold it: pin _6=1" in line for line in lines)
    assert max(map(len, lines[:-1])) <= 100


def test_the_model_and_its_cost_graph_give_the_same_answer(
    plan: str, costs: str, answer: dict[str, Any]
) -> None:
    by_model = answer
    by_graph = json.loads(invoke("explain", plan, costs, "--format", "json").stdout)
    # The graph has the groups of a capture: else its costs would not be those of the plan.
    assert by_model["notes"] == by_graph["notes"] == []
    kinds = [what_if["kind"] for what_if in by_model["what_ifs"]]
    assert kinds.count("group") == 3 and kinds.count("pin") == 1
    for one, other in zip(by_model["what_ifs"], by_graph["what_ifs"], strict=True):
        if one["kind"] == "microbatches":
            assert "name the model" in other["reason"]
        else:
            assert (one["change"], one["after"]) == (other["change"], other["after"])
    assert by_model["moves"] == by_graph["moves"]
    # A cost graph is nothing that can be planned: the plan says what can.
    assert by_model["target"] == TARGET
    assert by_graph["target"] == "models.py:mlp"


def test_the_commands_make_the_plans(folder: Path, answer: dict[str, Any]) -> None:
    tried = {what_if["kind"]: what_if for what_if in answer["what_ifs"]}
    for kind in ("microbatches", "pin", "next cut"):
        program, *arguments = shlex.split(tried[kind]["command"])
        assert program == "pipecompile"
        path = str(folder / "again.json")
        assert invoke(*arguments, "--no-self-check", "-o", path, "-q").exit_code == 0
        made = outcome_of(read(path, Plan))
        assert json.loads(json.dumps(tried[kind]["after"])) == {
            name: getattr(made, name) for name in made.__struct_fields__
        }
    assert answer["first"] in {what_if["command"] for what_if in answer["what_ifs"]}


def test_explain_for_github(plan: str, costs: str) -> None:
    result = invoke("explain", plan, costs, "--format", "github", "-q")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"### {plan}\n\n**step ")
    assert "| change | step |" in result.stdout
    assert "\n```sh\npipecompile plan models.py:mlp " in result.stdout
    assert result.stderr.startswith(f"::notice file={plan}::step ")
    assert result.stderr.count("\n") == 1


def test_another_model_is_an_answer_and_no_model_an_error(
    plan: str, folder: Path, costs: str
) -> None:
    stale = invoke("explain", plan, f"{MODELS}:sequential")
    assert (stale.exit_code, stale.stdout) == (1, "")
    assert "the plan was made for another graph" in stale.stderr
    other = planned(folder, "other", "--microbatches", "8")
    sized = invoke("explain", other, costs)
    assert (sized.exit_code, sized.stdout) == (1, "")
    assert "profile with --microbatches 8" in sized.stderr
    for target, fault in (("net.txt", "is not a target"), (plan, "a cost graph is expected")):
        result = invoke("explain", plan, target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert fault in result.stderr
    assert invoke("explain", plan, costs, "--time-limit", "-1").exit_code == 2


def test_explain_in_python(plan: str, costs: str) -> None:
    made = Plan.load(plan)
    found = pipecompile.explain(made, costs)
    assert found.before == outcome_of(made)
    assert len(found.what_ifs) == 9


def test_explain_imports_nothing_that_is_slow(plan: str) -> None:
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "slow = {'torch', 'ortools', 'networkx', 'rich', 'pipecompile.api.soundness'}\n"
        "try:\n    commands(['explain', *sys.argv[1:]])\nexcept SystemExit as end:\n"
        "    print(end.code, *slow & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, plan], capture_output=True, text=True)
    assert done.stderr == "0\n"


def test_a_cost_graph_needs_no_torch(plan: str, costs: str) -> None:
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "try:\n    commands(['explain', *sys.argv[1:]])\nexcept SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    arguments = [plan, costs, "-q", "--time-limit", "1e-6"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stderr == "0 False\n"
