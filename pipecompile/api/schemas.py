"""JSON Schemas of everything that pipecompile writes as JSON: its files, and results of commands.

They are generated from the values that read and write it. Needs no PyTorch.
`python -m pipecompile.api.schemas FOLDER` writes them, for docs/reference/schemas.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from pipecompile.cost_models.device import Device
from pipecompile.ir.audit import Audit
from pipecompile.ir.cluster import Cluster
from pipecompile.ir.cut import Cut
from pipecompile.ir.explanation import ExplainedPlan
from pipecompile.ir.finding import CheckedPlan
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.schedule_problem import Order, ScheduleProblem
from pipecompile.ir.serialization import encode, write
from pipecompile.report.plan_diff import ComparedPlans

__all__ = ["FORMATS", "schemas"]

FORMATS: Mapping[str, type[Any]] = {
    "cost-graph": CostGraph,
    "plan": Plan,
    "schedule-problem": ScheduleProblem,
    "links": Links,
    "cluster": Cluster,
    "device": Device,
    "run": RecordedRun,
    "audit-result": Audit,
    "check-result": CheckedPlan,
    "diff-result": ComparedPlans,
    "explain-result": ExplainedPlan,
    "partition-result": Cut,
    "schedule-result": Order,
}
"""What has a schema, by the name of its file: first files, by the kind that their `schema` names,
then results of commands.
"""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, bytes]:
    """Return the JSON Schema of each format, as the content of its file."""
    return {
        # `encode` sorts and indents as in all files of ours, so a schema that did not change is
        # not rewritten with other bytes, and its diff in a pull request is the change of the
        # format.
        f"{name}.json": encode({"$schema": _DIALECT, **_described(msgspec.json.schema(format_))})
        for name, format_ in FORMATS.items()
    }


def _described(schema: Any) -> Any:
    """Return `schema` with descriptions, which are docstrings, without the indentation of code."""
    match schema:
        # First, since a dict with a description is a dict too, and the first case that matches is
        # taken.
        case {"description": str(text), **rest}:
            return {"description": cleandoc(text), **_described(rest)}
        case dict():
            return {key: _described(value) for key, value in schema.items()}
        case list():
            return [_described(part) for part in schema]
    return schema


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in schemas().items():
        write(folder / file, content)
