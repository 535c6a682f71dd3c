"""Recorded runs that were made up: the steps that a plan predicts, slowed."""

from __future__ import annotations

from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedAction, RecordedRank, RecordedRun, RecordedStep
from pipecompile.ir.schedule import Kind
from pipecompile.ir.serialization import fingerprint
from pipecompile.schedule.full_pipeline import simulate_minibatches
from pipecompile.schedule.simulator import simulate_plan

LEAVING_NS = 1000  # from a rank's last action to the end of its step


def recorded_step(
    plan: Plan,
    number: int = 0,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    peak_bytes: int | None = None,
    minibatches: int | None = None,
) -> RecordedStep:
    """A step whose actions are ready when predicted, and take so many times as long; or several
    minibatches in flight.
    """
    predicted = simulate_minibatches(plan, minibatches) if minibatches else simulate_plan(plan)
    slowest = max(forward, backward)
    ranks = []
    for row in predicted.events:
        free, actions = 0, []
        for event in row:
            factor = forward if event.action.kind is Kind.FORWARD else backward
            ready = round(event.start_ns * slowest)
            end = ready + round((event.end_ns - event.start_ns) * factor)
            actions.append(RecordedAction(str(event.action), free, ready, end, 0, peak_bytes))
            free = end
        ranks.append(RecordedRank(start_ns=0, end_ns=free + LEAVING_NS, actions=tuple(actions)))
    return RecordedStep(
        number=number,
        microbatches=plan.microbatches * (minibatches or 1),
        microbatch_shapes=plan.microbatch_shapes,
        ranks=tuple(ranks),
    )


def recorded_run(plan: Plan, *steps: RecordedStep, processes: int | None = None) -> RecordedRun:
    """A run of these steps, on as many processes as the plan has ranks."""
    return RecordedRun(
        plan=fingerprint(plan),
        device="a device",
        torch="2.0",
        processes=processes or plan.ranks,
        clock_error_ns=0,
        steps=steps,
    )
