"""The JSON Schemas: they are those of docs/, and hold for what is written and not for what is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from zoo import MODELS

from pipecompile.api.cluster import cluster_of
from pipecompile.api.schemas import FORMATS, schemas
from pipecompile.cli import commands
from pipecompile.cost_models.device import named_devices
from pipecompile.errors import FormatError
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import decode, encode, read
from tests.recorded_runs import recorded_run, recorded_step

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "instances"
FOLDER = DOCS / "schemas"
FILES = ["cost-graph", "plan", "schedule-problem", "links", "cluster", "device", "run"]


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text()))


def test_the_schemas_of_the_documentation_are_those_of_the_values() -> None:
    # Written anew by `python -m pipecompile.api.schemas docs/reference/schemas`.
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == schemas()


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(json.loads((FOLDER / f"{name}.json").read_text()))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What pipecompile writes of each format, and the examples of the documentation."""
    folder = tmp_path_factory.mktemp("files")
    plan, again, costs = (str(folder / name) for name in ("plan.json", "again.json", "costs.json"))

    def printed(*arguments: str) -> Any:
        result = CliRunner().invoke(commands, [*arguments, "--format", "json"])
        assert result.exit_code in (0, 1), result.output
        return json.loads(result.stdout)

    model, device = f"{MODELS}:sequential", ("--costs", "roofline:h100", "--no-self-check")
    planned = printed("plan", model, "-k", "2", "--microbatches", "2", *device, "-o", plan)
    printed(
        "plan", model, "-k", "4", "--microbatches", "4", *device, "--schedule", "zb-h1", "-o", again
    )
    printed("profile", model, *device, "--microbatches", "2", "-o", costs)
    names = [f"%{node['name']}" for node in json.loads(Path(costs).read_text())["nodes"]]
    layout = json.dumps([names[:2], names[2:]])
    examples = examples_by_schema((DOCS / "formats.md").read_text())
    problem = folder / "problem.json"
    problem.write_text(json.dumps(examples["schedule-problem"]))
    run = recorded_run(read(plan, Plan), recorded_step(read(plan, Plan)))
    limits = ("--max-bubble", "0.01", "--memory", "1MiB")
    return {
        "plan": [planned, *(json.loads(Path(path).read_text()) for path in (plan, again))],
        "cost-graph": [json.loads(Path(costs).read_text()), examples["cost-graph"]],
        "schedule-problem": [examples["schedule-problem"]],
        "links": [examples["links"], planned["links"]],
        "cluster": [examples["cluster"], json.loads(encode(cluster_of("2x8xh100")))],
        "device": [json.loads(encode(device)) for device in named_devices().values()],
        "run": [json.loads(encode(run)), examples["run"]],
        "audit-result": [printed("audit", costs, "--layout", layout)],
        "check-result": [printed("check", plan, *limits)],
        "diff-result": [printed("diff", plan, path) for path in (again, plan)],
        "explain-result": [printed("explain", again), printed("explain", plan, costs)],
        "partition-result": [printed("partition", costs, "-k", "2")],
        "schedule-result": [printed("schedule", str(problem))],
    }


def examples_by_schema(page: str) -> dict[str, Any]:
    blocks = map(json.loads, re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    return {block["schema"].split("/")[1]: block for block in blocks}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_follows_its_schema(written: dict[str, list[Any]], name: str) -> None:
    assert written[name]
    for document in written[name]:
        assert [error.message for error in validator(name).iter_errors(document)] == []


Change = Callable[[dict[str, Any]], object]
FAULTS: dict[str, Change] = {
    "a field that nobody knows": lambda document: document.update(memory_cap=1),
    "another kind of file": lambda document: document.update(schema="pipecompile/other/1"),
    "no required field": lambda document: [
        document.pop(key) for key in list(document) if key != "schema"
    ],
    "a wrong type": lambda document: document.update(
        dict.fromkeys((key for key in document if key != "schema"), 1.5)
    ),
    "negative numbers": lambda document: document.update(
        {key: -1 for key, value in document.items() if isinstance(value, int)} or {"schema": -1}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FILES)
def test_what_a_schema_refuses_is_what_is_refused(
    written: dict[str, list[Any]], name: str, fault: str
) -> None:
    for document in written[name][:2]:
        changed = deepcopy(document)
        FAULTS[fault](changed)
        assert not validator(name).is_valid(changed)
        with pytest.raises(FormatError):
            decode(json.dumps(changed).encode(), FORMATS[name], origin="a test")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("cost-graph", "placement/layers-*.json"), ("schedule-problem", "schedule/rand-p4-*.json")],
)
def test_published_problems_follow_the_schemas(name: str, pattern: str) -> None:
    paths = sorted(SHARED.glob(pattern))
    if not paths:
        pytest.skip("the published instances are not here: they lie beside the repository")
    for document in (json.loads(path.read_text()) for path in paths[:4]):
        assert [error.message for error in validator(name).iter_errors(document)] == []
