"""Is a plan still current: is it what its options give for the model as it is now?"""

from __future__ import annotations

import logging

from torch import fx

from pipecompile.api.costs import comparable
from pipecompile.api.plan import make_plan, with_target
from pipecompile.errors import StalePlanError, StaleProfileError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode

__all__ = ["check_current", "staleness"]

logger = logging.getLogger("pipecompile.api")


def check_current(plan: Plan, captured: Captured) -> None:
    """Raise StalePlanError unless `plan` was made for this graph: nodes, shapes, parameters."""
    if plan.fingerprint.graph != captured.digest:
        raise StalePlanError(
            f"the plan was made for another graph ({plan.fingerprint.graph[:12]}…) than this model "
            f"has with these inputs ({captured.digest[:12]}…); plan again, or bring back the "
            "model, its mode and its shapes"
        )
    fault = _misplaced_node(plan, captured.module.graph)
    if fault is not None:
        raise StalePlanError(f"the plan was edited: {fault}; plan again")


def _misplaced_node(plan: Plan, graph: fx.Graph) -> str | None:
    """Return what is wrong with the stages of `plan` for `graph`; None if nothing is.

    A plan in a file may be edited.
    """
    stages = plan.assignment
    stage_of_group: dict[str, int] = {}
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    names = {node.name for node in nodes}
    if stages.keys() != names:
        return f"its nodes are not those of the model ({min(stages.keys() ^ names)})"
    for node in nodes:
        stage = stages[node.name]
        for source in node.all_input_nodes:
            if source.op != "get_attr" and stages[source.name] > stage:
                return f"{node.name} runs before {source.name}, which it needs"
        group = node.meta["group"]
        # setdefault gives the stage of the first node of the group that was met.
        if group is not None and stage_of_group.setdefault(group, stage) != stage:
            return f"it separates the nodes of group {group}"
    return None


def staleness(plan: Plan, target: Target) -> str | None:
    """Return why `plan` is no longer what its options give for this model; None if it is current.

    Costs are compared where they are the same on every machine (`comparable`): measured ones differ
    from run to run, and a function or a file may be missing here.
    """
    if not comparable(plan.options.costs):
        logger.info(
            "%s costs are not compared: they differ from run to run, or are not available here",
            plan.options.costs,
        )
    captured = capture_target(target, plan.options, verify=plan.capture.verified)
    try:
        check_current(plan, captured)
        if not comparable(plan.options.costs):
            return None
        current = make_plan(target, plan.options, captured, plan.links)
    except (StalePlanError, StaleProfileError) as error:
        return str(error)
    before, now = plan.fingerprint.costs, current.fingerprint.costs
    if now != before:
        return f"the costs changed ({before[:12]}… to {now[:12]}…); plan again"
    # As bytes: the same model, costs and options always give the same file, but for the spelling
    # of the target, such as the path to it.
    if encode(with_target(current, plan.capture.target)) != encode(plan):
        return "planning again gives another plan: the file was edited; plan again"
    return None
