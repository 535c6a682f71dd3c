"""Is a plan still current: is it what its options give for the model as it is now?"""

from __future__ import annotations

import logging
from collections import Counter

from msgspec.structs import replace
from torch import fx

from pipecompile.api.costs import comparable, cost_graph
from pipecompile.api.plan import make_plan, with_target
from pipecompile.errors import StalePlanError, StaleProfileError
from pipecompile.frontend.digest import node_digests
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.graph.copied_nodes import stages_of_copies
from pipecompile.ir.finding import Finding
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode
from pipecompile.report.model_changes import (
    Outline,
    OutlinedNode,
    drift_findings,
    memory_drift_findings,
    node_findings,
    outline,
    plan_outline,
)

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
    # Before the loop, which looks nodes up: a name that is missing would end it by a KeyError.
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
    for name, needed in stages_of_copies(graph, stages, plan.copied).items():
        if needed != {index for index, stage in enumerate(plan.stages) if name in stage.nodes}:
            return f"{name} is copied, but not to the stages {sorted(needed)}, which read it"
    return None


def staleness(
    plan: Plan, target: Target, *, name: str = "the model", drift: float | None = None
) -> list[Finding]:
    """Return whether `plan` is still what its options give for this model, called `name`, and if
    not what has changed in the model: nodes, and the times of blocks that drifted.

    Costs are compared where they are the same on every machine (`comparable`): measured ones differ
    from run to run, and a function or a file may be missing here. With `drift`, a share, times may
    differ by that much in each block, and measured ones are measured anew.
    """
    if not comparable(plan.options.costs) and drift is None:
        logger.info(
            "%s costs are not compared: they differ from run to run, or are not available here",
            plan.options.costs,
        )
    captured = capture_target(target, plan.options, verify=plan.capture.verified)
    try:
        check_current(plan, captured)
    except StalePlanError as error:
        is_edited = plan.fingerprint.graph == captured.digest
        changed = [] if is_edited else _changed_nodes(plan, target, captured, drift)
        return [_stale(str(error)), *changed]
    try:
        return _cost_findings(plan, target, captured, name, drift)
    except StaleProfileError as error:
        return [_stale(str(error))]


def _stale(message: str) -> Finding:
    return Finding(code="stale", message=message)


def _changed_nodes(
    plan: Plan, target: Target, captured: Captured, drift: float | None
) -> list[Finding]:
    """Return what differs between the graph of `plan` and that of the model; empty if the plan's
    file does not tell.
    """
    old = plan_outline(plan)
    if old is None:
        return []
    new = _model_outline(plan, target, captured)
    changed = node_findings(old, new, plan.time_unit)
    if not changed:
        message = "all nodes are the same, but they are connected otherwise, or in another order"
        changed = [Finding(code="nodes", message=message)]
    drifted = [] if drift is None else drift_findings(old, new, drift, plan.time_unit)
    # That all other blocks take the same says little beside what has changed.
    return [*changed, *(finding for finding in drifted if not finding.passed)]


def _model_outline(plan: Plan, target: Target, captured: Captured) -> Outline:
    """Return the blocks of the model as it is now, with their times if these may be compared."""
    digests = node_digests(captured.module)
    nodes = [
        OutlinedNode(node.meta.get("module", ""), node.name, digests[node.name])
        for node in captured.module.graph.nodes
        if node.op != "get_attr"
    ]
    if not comparable(plan.options.costs):
        return outline(nodes, None)
    try:
        graph = cost_graph(target, plan.options.costs, plan.options.microbatches, captured)
    except StaleProfileError:  # a table of the costs that the model had
        return outline(nodes, None)
    ns_by_module = Counter[str]()
    stages = plan.assignment
    for node in graph.nodes:
        if node.name in stages:  # on the device that the plan has it on
            rank = plan.schedule.placement[stages[node.name]]
            # Of unequal devices each has times of its own, and a plan's figures are those of the
            # rank that runs the node.
            node = graph.on_rank(rank).by_name[node.name]
        ns_by_module[node.module] += node.forward_ns + node.backward_ns
    return outline(nodes, ns_by_module)


def _cost_findings(
    plan: Plan, target: Target, captured: Captured, name: str, drift: float | None
) -> list[Finding]:
    """Return whether the model, whose graph is the plan's, has the plan's costs too."""
    same_graph = Finding(code="stale", passed=True, message=f"current: {name} has the plan's graph")
    same_plan = Finding(code="stale", passed=True, message=f"current: {name} gives this plan")
    if not comparable(plan.options.costs):
        if drift is None:
            return [same_plan]
        return [same_graph, *_drift(plan, target, captured, drift)]
    # Three ways not to be current, of which the first is told:
    #     another graph     with the nodes that changed (`check_current`, before this)
    #     other costs       with the blocks that drifted
    #     another file      somebody edited it: same model, same costs, and yet other bytes
    now = make_plan(target, plan.options, captured, plan.links)
    before, after = plan.fingerprint.costs, now.fingerprint.costs
    if before != after and drift is not None:
        return [same_graph, *_drift(plan, target, captured, drift)]
    if before != after:
        message = f"the costs changed ({before[:12]}… to {after[:12]}…); plan again"
        return [_stale(message), *_drift_between(plan, now, 0)]
    # As bytes: the same model, costs and options always give the same file, except the spelling
    # of the target, such as the path to it. How its options were chosen is not planned again.
    replanned = replace(with_target(now, plan.capture.target), joint=plan.joint)
    if encode(replanned) != encode(plan):
        return [_stale("planning again gives another plan: the file was edited; plan again")]
    return [same_plan] if drift is None else [same_plan, *_drift_between(plan, now, drift)]


def _drift(plan: Plan, target: Target, captured: Captured, limit: float) -> list[Finding]:
    """Return what in the costs of today differs by more than `limit` from those of the plan."""
    # With the plan's own cut: measured times depend on the stages that run, and memory on them too.
    now = make_plan(target, plan.options, captured, plan.links, assignment=plan.assignment)
    return [*_drift_between(plan, now, limit), *memory_drift_findings(plan, now, limit)]


def _drift_between(plan: Plan, now: Plan, limit: float) -> list[Finding]:
    old, new = plan_outline(plan), plan_outline(now)
    if old is None or new is None:
        return [_stale("the plan's file does not say what its blocks take; plan again")]
    return drift_findings(old, new, limit, plan.time_unit)
