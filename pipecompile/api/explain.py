"""Why a step takes as long as it does, and what would change it, for the command line and for
programs.

Needs no PyTorch, except for a target that is a model.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.explanation import TIME_LIMIT, Explanation
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from pipecompile.report.explanation_text import (
    explanation_headline,
    explanation_markdown,
    explanation_text,
)
from pipecompile.report.plan_facts import plan_facts

if TYPE_CHECKING:
    from pipecompile.planner.target_costs import TargetCosts

__all__ = [
    "explain",
    "explanation_headline",
    "explanation_markdown",
    "explanation_text",
]


def explain(
    plan: Plan, target: str | Path | CostGraph | None = None, *, time_limit: float = TIME_LIMIT
) -> Explanation:
    """Return why the step of a plan takes as long as it does, and what would change it.

    Without a `target` that is what the plan tells by itself. With one, the plan is also made again
    with one thing changed at a time, and `what_ifs` has what each comes to; none is begun after
    `time_limit` seconds. The target is the model of the plan, as `package.module:factory` or
    `path/file.py:factory`, or its cost graph or the file of that. StalePlanError if it is another
    model.
    """
    if target is None:
        return plan_facts(plan)
    if not 0 < time_limit < inf:
        raise InputError(f"a time limit of {time_limit:g} s: give a positive number")
    # Imported here: solvers need numpy and networkx, which what a plan tells by itself does not.
    from pipecompile.api.what_if import Planner, best_command, what_ifs
    from pipecompile.planner.heaviest_stage import edge_moves, undivided

    costs = _costs(plan, target)
    # Before anything is solved: advice for another model would be wrong without looking wrong.
    costs.check(plan)
    planner = Planner(plan, costs)
    current = planner.current()
    # All of `current`, and nothing of `plan`: a step by old costs beside changes by new ones
    # would show differences that the changes do not make.
    facts, problem = plan_facts(current), planner.problem(current)
    cut, heaviest = current.assignment, facts.heaviest
    name = _named_target(plan, target)
    tried = tuple(what_ifs(planner, current, name, time_limit))
    return replace(
        facts,
        undivided=undivided(problem, cut, heaviest, planner.graph_without_groups()),
        moves=tuple(edge_moves(problem, cut, heaviest)),
        what_ifs=tried,
        first=best_command(facts.before, tried),
        target=name,
        notes=() if current == plan else (_other_costs(plan, current),),
    )


def _costs(plan: Plan, target: str | Path | CostGraph) -> TargetCosts:
    """Return the costs of the nodes of `target`."""
    from pipecompile.planner.target_costs import GraphCosts

    if isinstance(target, CostGraph):
        return GraphCosts(target, plan.microbatches)
    if _is_graph_file(target):
        return GraphCosts(read(target, CostGraph), plan.microbatches, str(target))
    # Only now is PyTorch imported.
    from pipecompile.api.model_costs import ModelCosts

    return ModelCosts.of(str(target), plan)


def _is_graph_file(target: str | Path) -> bool:
    return str(target).endswith(".json")


def _named_target(plan: Plan, target: str | Path | CostGraph) -> str:
    """Return the model that commands are to plan: a cost graph is none."""
    if isinstance(target, CostGraph) or _is_graph_file(target):
        return plan.capture.target or "TARGET"
    return str(target)


def _other_costs(plan: Plan, current: Plan) -> str:
    """Return what a reader must know where the costs are not those of the plan."""
    before, now = (
        time_with_unit(each.prediction.step_ns, each.time_unit) for each in (plan, current)
    )
    return (
        f"the costs are not those that the plan was made by ({plan.options.costs}): it was made "
        f"again, with a step of {now} instead of {before}, and that plan is explained"
    )
