"""`pipecompile profile`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from zoo import MODELS

from pipecompile.cli import commands
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import decode, read

TARGET = f"{MODELS}:sequential"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """The cost graph, the page, and what was printed."""
    costs, page = (
        tmp_path_factory.mktemp("profile") / name for name in ("costs.json", "profile.html")
    )
    result = invoke("profile", TARGET, "--costs", "flops", "-o", str(costs), "--page", str(page))
    assert result.exit_code == 0, result.output
    return costs, page, result


def test_it_writes_the_cost_graph_that_it_sums_up(written: tuple[Path, Path, Result]) -> None:
    graph = read(written[0], CostGraph)
    figures = json.loads(invoke("profile", TARGET, "--costs", "flops", "--format", "json").stdout)
    assert figures["total"]["nodes"] == len(graph.nodes)
    assert figures["total"]["forward_ns"] == sum(node.forward_ns for node in graph.nodes)
    assert figures["total"]["parameter_bytes"] == sum(
        parameter.bytes for parameter in graph.parameters
    )


def test_the_page_and_the_text_tell_the_same(written: tuple[Path, Path, Result]) -> None:
    page, text = written[1].read_text(), written[2].stdout
    assert text.startswith("one microbatch, costs flops")
    assert "capture verified against the model" in text.splitlines()[0]
    for module in range(0, 19, 3):
        assert f"<code>{module}</code>" in page
    assert "\nmade with pipecompile " in written[2].stderr


def test_a_plan_by_the_file_is_the_plan_by_the_costs_in_it(
    written: tuple[Path, Path, Result],
) -> None:
    first, second = (
        invoke(
            "plan", TARGET, "-k", "4", "--microbatches", "4", "--costs", costs, "--format", "json"
        )
        for costs in ("flops", f"table:{written[0]}")
    )
    plans = [decode(result.stdout.encode(), Plan, origin="stdout") for result in (first, second)]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].stages == plans[1].stages


def test_the_file_is_refused_for_another_model_or_size(written: tuple[Path, Path, Result]) -> None:
    costs = f"table:{written[0]}"
    assert (
        invoke(
            "plan", f"{MODELS}:unet", "-k", "2", "--microbatches", "4", "--costs", costs
        ).exit_code
        != 0
    )
    assert invoke("plan", TARGET, "-k", "2", "--microbatches", "2", "--costs", costs).exit_code != 0


def test_an_optimizer_and_github_are_asked_for() -> None:
    result = invoke(
        "profile", TARGET, "--costs", "flops", "--optimizer", "adamw", "--format", "github"
    )
    assert result.stdout.startswith("```\n") and result.stdout.endswith("```\n")
    assert "(adamw)" in result.stdout
    assert invoke("profile", TARGET, "--costs", "flops", "--optimizer", "adamm").exit_code == 2
    assert invoke("profile", TARGET, "--costs", "flop").exit_code == 2
