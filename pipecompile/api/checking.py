"""Is a plan sound by itself, and within the limits that a team sets? Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.api.ordering import compared
from pipecompile.api.planning import predicted
from pipecompile.errors import PipecompileError
from pipecompile.ir.plan import Plan
from pipecompile.schedule.check import check as check_schedule
from pipecompile.schedule.problem import Problem
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["over_limits", "violations"]


def violations(plan: Plan) -> list[str]:
    """What is wrong with a plan by itself: its schedule, its prediction, its memory caps. Empty if it is sound."""
    try:
        problem = problem_of_plan(plan)
        found = check_schedule(plan.schedule, problem)
        return found or list(_edited(plan, problem))
    except PipecompileError as error:
        return [str(error)]


def _edited(plan: Plan, problem: Problem) -> Iterator[str]:
    """What the plan says of itself, though its stages and its schedule give something else."""
    if predicted(plan.stages, plan.schedule, plan.link, plan.options.memory_bytes) != plan.prediction:
        yield "the prediction is not what the plan's stages and schedule give: the file was edited; plan again"
    if plan.ordering is not None and (plan.ordering.named_ns, plan.ordering.bound_ns) != compared(problem):
        yield "the other schedules are not what the plan's stages give: the file was edited; plan again"


def over_limits(
    plan: Plan, *, max_imbalance: float | None, max_memory_bytes: int | None, max_bubble: float | None
) -> list[str]:
    """Which of the given limits the plan's prediction exceeds."""
    loads, found = plan.prediction.loads_ns, []
    imbalance = max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
    if max_imbalance is not None and imbalance > max_imbalance:
        found.append(f"imbalance {imbalance:.3f} (largest load / mean load) is over {max_imbalance}")
    if max_bubble is not None and plan.prediction.bubble > max_bubble:
        found.append(f"bubble {plan.prediction.bubble:.3f} is over {max_bubble}; more microbatches make it smaller")
    for rank, memory in enumerate(plan.prediction.memory):
        if max_memory_bytes is not None and memory.total.bound > max_memory_bytes:
            excess = memory.total.bound - max_memory_bytes
            found.append(f"rank {rank} may need {memory.total.bound} bytes, {excess} over {max_memory_bytes}")
    return found
