"""The rows of a plan: runs of nodes in one module, in the order of the forward, with their
stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.layouts.layers import LayerList, ancestors, find_layers
from pipecompile.layouts.sections import parameter_modules

__all__ = ["PlanRow", "layers_of_rows", "rows_of", "stages_by_path", "with_parameters"]


class PlanRow(NamedTuple):
    """A run of nodes of one module in one stage, and its forward and backward in ns."""

    place: int
    module: str
    stage: int
    nodes: tuple[str, ...]
    ns: int


def rows_of(plan: Plan) -> list[PlanRow]:
    """Return the rows of a plan; InputError if its file does not say where nodes lie."""
    rows = []
    for number, stage in enumerate(plan.stages):
        if not stage.module_runs:
            raise InputError(
                "the plan does not say in which modules its nodes lie: it was made by an older "
                "version; plan again"
            )
        # Runs have only how many nodes they have: their names follow each other in those of the
        # stage.
        nodes = iter(stage.own_nodes)
        for run in stage.module_runs:
            names = tuple(next(nodes) for _ in range(run.nodes))
            rows.append(PlanRow(run.place, run.module, number, names, run.ns))
    # By place: a run of nodes may lie in a later stage than one that follows it in the forward.
    return sorted(rows)


def with_parameters(plan: Plan) -> frozenset[str]:
    """Return the paths of the modules that have parameters or buffers of their own."""
    return parameter_modules(
        name for each in plan.parameters for name in (each.name, *each.aliases)
    )


def layers_of_rows(rows: Iterable[PlanRow], container: str | None) -> LayerList:
    """Return the layers of the model that a plan is of."""
    ns_by_module = Counter[str]()
    for row in rows:
        ns_by_module[row.module] += row.ns
    return find_layers(ns_by_module, container)


def stages_by_path(rows: Sequence[PlanRow]) -> dict[str, set[int]]:
    """Return the stages in which each module lies, with all that is in it, in the order of the
    forward.
    """
    stages: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for path in ancestors(row.module):
            stages[path].add(row.stage)
    return dict(stages)
