"""`pipecompile export` and `plan --layout`: what they print, write and answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode, read, write
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.layout_text import read_layout
from pipecompile.schedule.torch_csv import read_csv
from tests.layouts.models import decoder
from tests.layouts.plans import planned

GRAPH = decoder(4)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan whose cut lies between the attention and the MLP of layer 1."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write(path, encode(planned(GRAPH, assignment_of(read_layout("*-*|-*-*-"), GRAPH))))
    return str(path)


def test_a_cut_is_printed_and_can_be_written(plan_file: str, tmp_path: Path) -> None:
    result = invoke("export", plan_file, "--to", "megatron-hybrid")
    assert (result.exit_code, result.stdout) == (0, "*-*|-*-*-\n")
    path = tmp_path / "layout.json"
    assert invoke("export", plan_file, "--to", "JSON", "-o", str(path)).exit_code == 0
    read_back = assignment_of(read_layout(path.read_text()), GRAPH)
    assert read_back == read(plan_file, Plan).assignment


def test_a_cut_that_cannot_be_said_is_an_error_unless_it_is_rounded(plan_file: str) -> None:
    refused = invoke("export", plan_file, "--to", "vllm")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "layer 1 lies in stages 0 and 1; export to megatron-hybrid or" in refused.stderr
    rounded = invoke("export", plan_file, "--to", "vllm", "--round")
    assert (rounded.exit_code, rounded.stdout) == (0, "VLLM_PP_LAYER_PARTITION=2,2\n")
    assert "rounded: layer 1 to stage 0; forward and backward of a microbatch" in rounded.stderr
    assert "take 558 ns instead of 662 ns (-15.7%)" in rounded.stderr


def test_the_schedule_is_exported_without_transfers(plan_file: str) -> None:
    result = invoke("export", plan_file, "--to", "torch-csv")
    assert result.exit_code == 0
    schedule = read(plan_file, Plan).schedule
    assert read_csv(result.stdout).rows == schedule.compute


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "megatrom"), "unknown format 'megatrom'; did you mean 'megatron'"),
        (("--to", "megatron", "--layers", "blocks"), "choose from layers"),
    ],
)
def test_mistakes_are_answered(plan_file: str, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("export", plan_file, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "nowhere.py:net", "--layout", "Et|xL"),
        ("plan", "nowhere.py:net", "--layout", "Et|tL", "-k", "3"),
    ],
)
def test_a_mistake_in_a_layout_is_answered_before_pytorch_is_imported(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nowhere.py").write_text("import torch\n")
    code = (
        "import sys; from pipecompile.cli import commands\n"
        "try: commands(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 2, result.stderr
    assert "layout" in result.stderr
