"""Stage correction: whole stages are measured, and the costs of their nodes are scaled so that they
add up to them.

What a stage takes is not the sum of what its nodes take alone: caches, accumulated gradients and
the runtime's own work are missing from that sum. The correction goes in rounds:

    draft a plan ─▶ run its stages as the runtime does ─▶ scale the costs of their nodes ─┐
         ▲────────────────────────────────────────────────────────────────────────────────┘

The scaled costs may move the cut, and then the new stages are run. The rounds end when the cut
stays where it is, when an earlier cut comes back, or after `ROUNDS`; the best plan of those whose
stages were run is returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipecompile.ir.duration import time_text
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import Kind
from pipecompile.profiling.scaled_costs import Times, scaled

__all__ = ["DoesNotFitError", "Draft", "correct_stages"]

logger = logging.getLogger("pipecompile.profiling")
ROUNDS = 4
SUSPICIOUS_RATIO = 3.0  # far above what caches and the runtime add to nodes that take microseconds
KINDS = {Kind.FORWARD: "forward_ns", Kind.BACKWARD: "backward_ns"}


class DoesNotFitError(Exception):
    """A device lacks the memory to run its stages; the message says which one."""


class Draft(Protocol):
    """What makes a plan from costs, with the cut left open or given."""

    def __call__(self, graph: CostGraph, *, assignment: Mapping[str, int] | None = None) -> Plan:
        """Return the plan for `graph`."""


def correct_stages(
    graph: CostGraph, draft: Draft, measure: Callable[[Plan], Sequence[Times]]
) -> Plan:
    """Return the plan for `graph` whose stages take exactly what they were measured to take.

    `measure` gives the times of a plan's stages. If they do not fit on their devices, the plan is
    the best one of those that were measured before, or else the one for `graph` as it is.
    """
    plan, measured = draft(graph), list[Plan]()
    ratio: float | None = None
    # An earlier cut that comes back would be measured as
    # before, and the rounds would go in a circle.
    while len(measured) < ROUNDS and all(plan.assignment != other.assignment for other in measured):
        try:
            times = measure(plan) if measured else _measured_with_care(plan, measure)
        except DoesNotFitError as error:
            logger.warning("stage correction is left out: %s", error)
            return min(measured or [plan], key=_step_ns)
        # Of the first round only: afterwards costs are scaled, and the ratio is about 1.
        if ratio is None:
            ratio = _ratio(plan, times)
        # The next cut may mix nodes of stages that ran. These keep what they were scaled
        # to, which is the best that is known of them, until a stage with them runs again.
        graph = scaled(graph, plan.stages, times)
        cut, plan = plan.assignment, draft(graph)
        # The plan that was measured is the one with the cut whose stages ran, not the next one.
        measured.append(plan if plan.assignment == cut else draft(graph, assignment=cut))
    rounds = "1 round" if len(measured) == 1 else f"{len(measured)} rounds"
    logger.info("stage correction: %s, stages took %.2f× their nodes' sum", rounds, ratio)
    return min(measured, key=_step_ns)


def _step_ns(plan: Plan) -> int:
    return plan.prediction.step_ns


def _measured_with_care(plan: Plan, measure: Callable[[Plan], Sequence[Times]]) -> Sequence[Times]:
    """Return the times of the plan's stages; measured twice, with a warning, if they are far above
    their nodes' sum.
    """
    times = measure(plan)
    if _ratio(plan, times) <= SUSPICIOUS_RATIO:
        return times
    logger.info("stages took %.0f× their nodes' sum: they are measured again", _ratio(plan, times))
    # Other programs only ever lengthen a run, so the shorter of two is nearer to the truth.
    times = min(times, measure(plan), key=lambda attempt: _ratio(plan, attempt))
    ratio = _ratio(plan, times)
    if ratio > SUSPICIOUS_RATIO:
        logger.warning(
            "stages took %.0f× their nodes' sum (%s instead of %s a microbatch), "
            "measured twice: either other programs keep the device busy, and then plan again "
            "when it is idle, or the nodes are so short that the runtime's own work for each "
            "action outweighs them, and then larger microbatches are faster",
            *(ratio, time_text(_stages_ns(times)), time_text(_nodes_ns(plan, times))),
        )
    return times


def _ratio(plan: Plan, times: Sequence[Times]) -> float:
    """Return what the stages take over what their nodes take."""
    nodes = _nodes_ns(plan, times)
    return _stages_ns(times) / nodes if nodes else 1.0


def _stages_ns(times: Sequence[Times]) -> int:
    return sum(stage[kind] for stage in times for kind in _measured_kinds(times))


def _nodes_ns(plan: Plan, times: Sequence[Times]) -> int:
    names = [KINDS[kind] for kind in _measured_kinds(times)]
    return sum(getattr(stage, name) for stage in plan.stages for name in names)


def _measured_kinds(times: Sequence[Times]) -> list[Kind]:
    return [kind for kind in KINDS if all(kind in stage for stage in times)]
