"""The texts of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pipecompile.layouts.layers import ancestors
from pipecompile.layouts.layout import NODE
from pipecompile.layouts.rows import PlanRow, stages_by_path

__all__ = ["json_text", "lists_text", "mapping_text", "prefixes_of"]


def json_text(rows: Sequence[PlanRow], k: int) -> str:
    """Return modules and, where the cut divides a module, its nodes, as a JSON list of stages."""
    stages: list[list[str]] = [[] for _ in range(k)]
    for path, stage in prefixes_of(rows).items():
        stages[stage].append(path)
    stages_of = stages_by_path(rows)
    for row in rows:
        # The model itself is no module that a layout could name.
        if len(stages_of[row.module]) > 1 or not row.module:
            stages[row.stage] += [f"{NODE}{name}" for name in row.nodes]
    return lists_text(stages)


def prefixes_of(rows: Sequence[PlanRow]) -> dict[str, int]:
    """Return the outermost modules that lie in one stage as a whole, with their stage."""
    stages = stages_by_path(rows)
    prefixes: dict[str, int] = {}
    for row in rows:
        # The ancestors of h.0.attn.qkv are these, h.0.attn, h.0 and h. If h lies in several
        # stages and h.0 in one, then h.0 is the outermost whole one, and one entry for the layer.
        whole = [path for path in ancestors(row.module) if path and len(stages[path]) == 1]
        if whole:
            prefixes[whole[-1]] = row.stage
    return prefixes


def lists_text(stages: Sequence[Sequence[str]]) -> str:
    """Return lists of names as JSON, with a line for each stage."""
    rows = ",\n ".join(json.dumps(list(stage)) for stage in stages)
    return f"[{rows}]"


def mapping_text(values: Mapping[str, str]) -> str:
    """Return a mapping of names to words that are written as they are, with a line for each."""
    rows = ",\n ".join(f"{json.dumps(name)}: {word}" for name, word in values.items())
    return f"{{{rows}}}"
