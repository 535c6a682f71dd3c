"""Plans that are made again with one thing changed, and what each comes to. Needs no PyTorch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from pipecompile.api.changes import ChangedOptions, changes, removals
from pipecompile.api.links import links_for
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.command_line import plan_command
from pipecompile.ir.explanation import Outcome, WhatIf
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options, Plan
from pipecompile.partition.edge_moves import next_best_pin
from pipecompile.partition.problem import PartitionProblem
from pipecompile.planner.draft import costs_digest, draft, planned_graph
from pipecompile.planner.option_conflicts import check_together
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.target_costs import TargetCosts
from pipecompile.report.plan_facts import outcome_of

__all__ = ["Planner", "best_command", "what_ifs"]

logger = logging.getLogger("pipecompile.api")

CUT_SECONDS = 0.5  # of work on each cut that may be the next-best one
WORTH_PERCENT = 1  # a step that is shorter by less is no advice
TO_BE_BOUGHT = ("memory", "stages")


@dataclass(frozen=True)
class Planner:
    """Makes plans of the model of `plan` by its costs, over its links."""

    plan: Plan
    costs: TargetCosts

    def current(self) -> Plan:
        """Return the plan, made again if the costs are not those that it was made by."""
        graph = self.costs.graph(self.plan.options)
        is_same = costs_digest(graph) == self.plan.fingerprint.costs
        return self.plan if is_same else self.made_with(self.plan.options)

    def made_with(self, options: Options) -> Plan:
        """Return the plan with these options; InputError or InfeasibleError if there is none."""
        # First: doubled microbatches or another schedule may not go with an option of the plan,
        # which is then the reason that `explain` prints beside the change.
        check_together(options)
        links = links_for(options, self.plan.links)
        return draft(
            self.costs.graph(options),
            options,
            graph_digest=self.plan.fingerprint.graph,
            capture=self.plan.capture,
            microbatch_shapes=self.plan.microbatch_shapes,
            links=links,
        )

    def graph_without_groups(self) -> CostGraph:
        """Return the cost graph of a microbatch, with the groups alone that every cut keeps."""
        return self.costs.graph(replace(self.plan.options, groups=()))

    def problem(self, plan: Plan) -> PartitionProblem:
        """Return the problem that the cut of `plan` solves; of a layout's, without the layout."""
        # A layout is a fixed assignment, under which nothing could be moved.
        options = replace(plan.options, layout=None, layout_format=None, layers=None)
        graph = planned_graph(self.costs.graph(options), options, plan.links)
        return problem_of(graph, options, plan.links, plan.schedule.placement)


def what_ifs(planner: Planner, current: Plan, target: str, time_limit: float) -> Iterator[WhatIf]:
    """Yield what the current plan would come to with each change.

    None is begun when `time_limit` seconds have passed since the first. Their commands plan
    `target`.
    """
    deadline = time.monotonic() + time_limit

    def may_go_on() -> bool:
        return time.monotonic() < deadline

    for change in _all_changes(planner, current, may_go_on):
        # Listed all the same, without a figure: a reader must not take what was not tried for
        # something that does not help.
        if change.options is not None and not may_go_on():
            reason = f"not tried: the time limit of {time_limit:g} s had passed"
            change = change._replace(options=None, reason=reason)
        yield _what_if(planner, change, target)


def _all_changes(
    planner: Planner, current: Plan, may_go_on: Callable[[], bool]
) -> Iterator[ChangedOptions]:
    yield from changes(current)
    yield _next_best_cut(planner, current, may_go_on)
    yield from removals(current)


def _next_best_cut(planner: Planner, plan: Plan, may_go_on: Callable[[], bool]) -> ChangedOptions:
    """Return the change to the best cut that is not the plan's: that of a pin."""
    text, options = "the next-best cut", plan.options
    if options.layout is not None:
        return ChangedOptions("next cut", text, None, "the layout fixes the cut")
    logger.info("what if: %s", text)
    # "Any cut but this one" is no constraint that the solver has, but another cut moves something
    # across a boundary. So what lies at one is pinned to the other side, each in turn, and the
    # best of these cuts is taken:
    #     plan        a b | c d       pins tried    b in stage 1,    c in stage 0
    pin = next_best_pin(
        planner.problem(plan), plan.assignment, seconds=CUT_SECONDS, may_go_on=may_go_on
    )
    if pin is None:
        return ChangedOptions("next cut", text, None, "no other cut was found")
    node, stage = pin
    text = f"{text}: {node} in stage {stage}"
    return ChangedOptions("next cut", text, replace(options, pin={**options.pin, node: stage}))


def _what_if(planner: Planner, change: ChangedOptions, target: str) -> WhatIf:
    """Return what a plan with the change comes to, or why there is none."""
    after, reason, command = None, change.reason, ""
    if change.options is not None:
        command = plan_command(target, change.options, planner.plan.links)
        logger.info("what if: %s", change.text)
        try:
            after = outcome_of(planner.made_with(change.options))
        except (InputError, InfeasibleError) as error:
            reason = str(error)
    return WhatIf(kind=change.kind, change=change.text, command=command, after=after, reason=reason)


def best_command(before: Outcome, tried: tuple[WhatIf, ...]) -> str:
    """Return the command of the change with the shortest step; "" if none is worth it.

    What has to be bought is not advised where something else helps.
    """
    # Tuples are compared from the left, and False comes before True:
    #     (False, 90, "… --schedule search")  <  (True, 70, "… --memory 17GiB")
    # So what has to be bought wins only if nothing else helps by a per cent.
    helpful = [
        (what_if.kind in TO_BE_BOUGHT, what_if.after.step_ns, what_if.command)
        for what_if in tried
        if what_if.after is not None
        and what_if.after.step_ns * 100 < before.step_ns * (100 - WORTH_PERCENT)
    ]
    return min(helpful, default=(False, 0, ""))[2]
