"""The GitHub action and the pre-commit hook, run in a repository as GitHub and pre-commit run them,
with what README shows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipecompile.cli import commands

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
README = (ROOT / "README.md").read_text()
USES, HOOKS = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[0])
MODEL = """
import torch
from torch import nn


def target():
    layers = [nn.Linear(64, 64) for _ in range(8)]
    return {
        "model": nn.Sequential(*layers),
        "sample_input": torch.ones(32, 64),
        "targets": torch.ones(32, 64),
        "loss_fn": nn.functional.mse_loss,
    }
"""
PLAN = ("-k", "2", "--microbatches", "8", "--costs", "roofline:h100", "--no-self-check")
CHANGED = MODEL.replace("range(8)", "range(10)")
INSTALL, CHECK, SHOW = (step["name"] for step in ACTION["runs"]["steps"][1:])


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )


def git(cwd: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = run("git", *identity, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository, as `uses:` and `repo:` fetch it."""
    folder = tmp_path_factory.mktemp("fetched") / "pipecompile"
    folder.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md", "action.yml", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, folder)
    for name in ("pipecompile", "passes", "cost_models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


@dataclass(frozen=True)
class Job:
    """A job on GitHub: the folder of the repository, and what its runner sets."""

    workspace: Path
    environment: dict[str, str]

    @property
    def summary(self) -> str:
        path = Path(self.environment["GITHUB_STEP_SUMMARY"])
        return path.read_text() if path.exists() else ""

    def run(self, **inputs: str) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run the steps after the installation up to a failure, and those that run all the same."""
        known = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}
        assert inputs.keys() <= known.keys()
        done: dict[str, subprocess.CompletedProcess[str]] = {}
        for step in ACTION["runs"]["steps"]:
            if "uses" in step or step["name"] == INSTALL or not self.runs(step, done):
                continue
            assert step["shell"] == "bash"
            given = {name: filled(text, known | inputs) for name, text in step["env"].items()}
            # As GitHub starts `shell: bash`.
            bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
            done[step["name"]] = run(*bash, cwd=self.workspace, **self.environment, **given)
        return done

    def runs(self, step: dict[str, Any], done: dict[str, Any]) -> bool:
        if "if" not in step:
            return all(each.returncode == 0 for each in done.values())
        assert step["if"] == "${{ !cancelled() && github.base_ref != '' }}"
        return bool(self.environment["GITHUB_BASE_REF"])


def filled(text: str, inputs: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], text)


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of jobs in which the action has installed pipecompile; nothing is fetched."""
    site = tmp_path_factory.mktemp("site")
    path = (site / "bin", Path(sys.executable).parent, os.environ["PATH"])
    environment = {
        "GITHUB_ACTION_PATH": str(checkout),
        "GITHUB_BASE_REF": "",
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": str(site),
        "PIP_TARGET": str(site),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the opposite of its name: no isolation
    }
    (install,) = (step for step in ACTION["runs"]["steps"] if step.get("name") == INSTALL)
    done = run("bash", "-e", "-c", install["run"], cwd=checkout, TORCH="", **environment)
    assert done.returncode == 0, done.stderr
    assert (site / "bin" / "pipecompile").is_file()
    return environment


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The plan of the model, and that of the changed model."""
    return plan_of(MODEL, tmp_path_factory), plan_of(CHANGED, tmp_path_factory)


def plan_of(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "net.py").write_text(model)
    command = ["plan", f"{folder / 'net.py'}:target", *PLAN, "-o", str(folder / "plan.json")]
    result = CliRunner().invoke(commands, command)
    assert result.exit_code == 0, result.output
    return (folder / "plan.json").read_text()


@pytest.fixture
def job(installed: dict[str, str], plans: tuple[str, str], tmp_path: Path) -> Job:
    """A job of a pull request to main, in a repository with a model and its plan."""
    workspace, origin = tmp_path / "workspace", tmp_path / "origin"
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", str(workspace))
    (workspace / "net.py").write_text(MODEL)
    (workspace / "plan.json").write_text(plans[0])
    git(workspace, "add", ".")
    git(workspace, "commit", "--quiet", "-m", "a model and its plan")
    git(tmp_path, "clone", "--quiet", "--bare", str(workspace), str(origin))
    git(workspace, "remote", "add", "origin", str(origin))
    own = {
        "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(tmp_path / "temp"),
    }
    return Job(workspace, installed | own)


def codes(done: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, int]:
    return {name: step.returncode for name, step in done.items()}


def test_what_readme_gives_the_action_is_what_it_takes() -> None:
    assert USES["uses"].startswith("your-org/pipecompile@")
    assert USES["with"].keys() <= ACTION["inputs"].keys()
    required = {name for name, given in ACTION["inputs"].items() if given.get("required")}
    assert required <= USES["with"].keys()


def test_a_pull_request_that_changes_the_model_fails_without_a_new_plan(job: Job) -> None:
    (job.workspace / "net.py").write_text(CHANGED)
    done = job.run(**USES["with"])
    assert codes(done) == {CHECK: 1, SHOW: 0}, done
    assert job.summary.startswith("### plan.json: 2 of 6 checks failed\n")
    assert "\n✗ 8 … 9 (2 blocks): came, each 1 node" in job.summary
    errors = done[CHECK].stderr.splitlines()
    assert len(errors) == len(
        [line for line in errors if line.startswith("::error file=plan.json")]
    )
    # The plan itself is still that of the base.
    assert job.summary.endswith("the plans are the same\n")


def test_a_new_plan_is_compared_with_that_of_the_base(job: Job, plans: tuple[str, str]) -> None:
    (job.workspace / "plan.json").write_text(plans[1])
    done = job.run(plan="plan.json")
    assert codes(done) == {CHECK: 0, SHOW: 0}, done
    assert "\n| step | before | after | change |\n" in job.summary
    assert "- `8 … 9`: added, in stage 1" in job.summary
    assert done[SHOW].stderr.startswith("::notice file=plan.json::the plan differs: ")


def test_without_a_target_the_action_needs_no_torch(job: Job, tmp_path: Path) -> None:
    bare = Job(job.workspace, without_torch(job.environment, tmp_path))
    assert codes(bare.run(plan="plan.json", options="--max-bubble 90%")) == {CHECK: 0, SHOW: 0}
    assert bare.summary.startswith("### plan.json: all 2 checks passed\n")
    assert bare.summary.endswith("the plans are the same\n")


def test_a_push_has_no_base_to_compare_with(job: Job) -> None:
    push = Job(job.workspace, job.environment | {"GITHUB_BASE_REF": ""})
    options = "--max-memory 1TiB\n--max-bubble 1%\n"  # the second line counts too
    assert codes(push.run(plan="plan.json", options=options)) == {CHECK: 1}


def without_torch(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """An environment in which it is an error to import torch."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise RuntimeError('torch is imported')")
    return environment | {"PYTHONPATH": f"{hidden}{os.pathsep}{environment['PYTHONPATH']}"}


def test_a_plan_that_the_base_does_not_have_is_said_to_be_new(job: Job) -> None:
    plan_file = job.workspace / "plan.json"
    plan_file.rename(job.workspace / "other.json")
    assert codes(job.run(plan="*.json")) == {CHECK: 0, SHOW: 0}
    assert job.summary.endswith("### other.json\n\nnot on main yet\n")


def test_inputs_are_words_and_no_commands(job: Job) -> None:
    marker = job.workspace / "marker"
    options = f"--max-bubble $(touch${{IFS}}{marker})"
    done = job.run(
        plan="plan.json", target=f"net.py:target;touch {marker}", options=options, torch=""
    )
    assert done["Check the plans"].returncode == 2
    assert not marker.exists()


def hook_in(job: Job, checkout: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the hook on all files, as README configures it."""
    entry = HOOKS | {"repo": str(checkout), "rev": git(checkout, "rev-parse", "HEAD")}
    configuration = job.workspace / ".pre-commit-config.yaml"
    configuration.write_text(yaml.safe_dump({"repos": [entry]}))
    git(job.workspace, "add", ".")
    environment = without_torch(job.environment, folder) | {"PRE_COMMIT_HOME": str(folder / "home")}
    pre_commit = (sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose")
    return run(*pre_commit, cwd=job.workspace, **environment)


def test_the_hook_passes_sound_plans(job: Job, checkout: Path, tmp_path: Path) -> None:
    shutil.copy(job.workspace / "plan.json", job.workspace / "large.plan.json")
    (job.workspace / "costs.json").write_text("{}")  # no plan
    done = hook_in(job, checkout, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed" in done.stdout
    assert done.stdout.count("✓ sound: schedule, stages and prediction agree") == 2


def test_the_hook_fails_on_a_plan_that_was_edited(job: Job, checkout: Path, tmp_path: Path) -> None:
    path = job.workspace / "plan.json"
    text = path.read_text()
    edited = re.sub(r'"step_ns": (\d+)', lambda match: f'"step_ns": {int(match[1]) // 2}', text)
    assert edited != text
    path.write_text(edited)
    done = hook_in(job, checkout, tmp_path)
    assert done.returncode == 1
    assert "the file was edited; plan again" in done.stdout
