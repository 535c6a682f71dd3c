"""Stage correction: whole stages are measured, nodes scaled to add up to them, and the graph is cut again.

What a stage takes is not the sum of what its nodes take alone: caches, accumulated gradients and the runtime's own
work are missed. So the cut is made, its stages are run as the runtime runs them, and the costs of the nodes in each are
scaled; that may move the cut, and then the new stages are run. It ends when the cut stays where it is, when one comes
back, or after a few rounds; the best of those that were run is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipecompile.api.scaling import Times, scaled
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Kind

__all__ = ["DoesNotFitError", "Draft", "corrected"]

ROUNDS = 4


class DoesNotFitError(Exception):
    """A device has not the memory to run its stages; the message says which."""


class Draft(Protocol):
    """From costs to a plan, with the cut left open or given."""

    def __call__(self, graph: CostGraph, *, assignment: Mapping[str, int] | None = None) -> Plan:
        """The plan for `graph`."""


def corrected(graph: CostGraph, draft: Draft, measure: Callable[[Plan], Sequence[Times]]) -> Plan:
    """The plan for `graph` whose stages take what they were measured to take, exactly.

    `measure` gives the times of a plan's stages. If they do not fit on their devices, it is the best plan of those that
    were measured before, or else the one for `graph` as it is. What was found is said on standard error.
    """
    plan, run = draft(graph), list[Plan]()
    ratio = None
    while len(run) < ROUNDS and all(plan.assignment != other.assignment for other in run):
        try:
            times = measure(plan)
        except DoesNotFitError as error:
            print(f"stage correction left out: {error}", file=sys.stderr)
            return min(run or [plan], key=lambda plan: plan.prediction.step_ns)
        ratio = ratio or _ratio(plan, times)
        graph = scaled(graph, plan.stages, times)
        cut, plan = plan.assignment, draft(graph)
        run.append(plan if plan.assignment == cut else draft(graph, assignment=cut))
    print(f"stage correction: {_rounds(len(run))}, stages took {ratio:.2f}× their nodes' sum", file=sys.stderr)
    return min(run, key=lambda plan: plan.prediction.step_ns)


def _ratio(plan: Plan, times: Sequence[Times]) -> float:
    """What the stages take over what their nodes take."""
    kinds = {Kind.FORWARD: "forward_ns", Kind.BACKWARD: "backward_ns"}
    known = [(kind, name) for kind, name in kinds.items() if all(kind in each for each in times)]
    nodes = sum(getattr(stage, name) for stage in plan.stages for _, name in known)
    return sum(each[kind] for each in times for kind, _ in known) / nodes if nodes else 1.0


def _rounds(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds"
