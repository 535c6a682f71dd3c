"""Is a plan sound by itself, and within the limits that a team sets? Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from pipecompile.api.plan import predicted
from pipecompile.errors import PipecompileError
from pipecompile.ir.plan import Options, Ordering, Plan, Recompute, Stage
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.size import budgets
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named import MAY_SPLIT
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.selection import (
    compared,
    named_schedule,
    named_schedule_within,
    placements,
)
from pipecompile.schedule.stages import activation_caps, excess_of, problem_of_plan

__all__ = ["over_limits", "violations"]


def violations(plan: Plan) -> list[str]:
    """What is wrong with a plan by itself: its schedule, its prediction, its memory caps. Empty if it is sound."""
    try:
        problem = problem_of_plan(plan)
        found = check_schedule(plan.schedule, replace(problem, caps=None))
        return (
            found or list(_misstated(plan)) or list(_over_cap(plan)) or list(_edited(plan, problem))
        )
    except PipecompileError as error:
        return [str(error)]


KINDS: Mapping[Recompute, set[str]] = {
    "auto": {"stage", "except-last", "regions"},
    "block": {"regions"},
    "sqrt": {"regions"},
}
"""What stages compute again by policies that are no kind themselves."""


def _misstated(plan: Plan) -> Iterator[str]:
    """Which stages compute again, or save in another form, what no plan with these options would."""
    for index, stage in enumerate(plan.stages):
        if fault := _fault_of(stage, plan.options):
            yield f"stage {index} {fault}: the file was edited; plan again"


def _fault_of(stage: Stage, options: Options) -> str | None:
    if stage.recompute not in KINDS.get(options.recompute, {options.recompute}) | {"none"}:
        return f"recomputes by {stage.recompute!r}, but recompute is {options.recompute!r}"
    if (stage.recompute == "regions") != bool(stage.regions):
        return f"recomputes by {stage.recompute!r}, but has {len(stage.regions)} regions"
    if stage.recompute == "except-last" and options.schedule == "search":
        return "recomputes by 'except-last', which is not possible under schedule 'search'"
    if stage.regions and options.schedule in MAY_SPLIT:
        return f"has regions, which are not possible under schedule {options.schedule!r}"
    if stage.recompute == "none" and stage.recompute_ns:
        return f"computes nothing again, but for {stage.recompute_ns} ns"
    if stage.recompute_bound_ns > stage.extra_ns:
        return f"takes {stage.extra_ns} ns more, but at least {stage.recompute_bound_ns}"
    if unasked := {policy for run in stage.saving for policy in run.policies} - {*options.saving}:
        return f"saves by {min(unasked)!r}, which the options do not allow"
    return _misplaced(stage)


def _misplaced(stage: Stage) -> str | None:
    """Regions are runs of the stage's nodes that lie apart or one within the other; runs that save otherwise, apart."""
    runs = [run.nodes for run in stage.saving]
    for nodes in chain(stage.regions, runs):
        first = stage.nodes.index(nodes[0]) if nodes and nodes[0] in stage.nodes else 0
        if not nodes or nodes != stage.nodes[first : first + len(nodes)]:
            return f"has {', '.join(nodes[:1]) or 'nothing'} … as a region or a run, which is no run of its nodes"
    pairs = [(set(one), set(other)) for one, other in combinations(stage.regions, 2)]
    if shared := next((a & b for a, b in pairs if a & b and not (a < b or b < a)), None):
        return f"has {min(shared)} in two regions, neither within the other"
    every = [*runs, {name for region in stage.regions for name in region}]
    if shared := next(
        (set(a) & set(b) for a, b in combinations(every, 2) if not set(a).isdisjoint(b)), None
    ):
        return f"saves {min(shared)} in another form twice, or computes it again too"
    return None


def _over_cap(plan: Plan) -> Iterator[str]:
    """Which ranks may hold more than the plan's options allow."""
    caps = plan.options.caps(plan.ranks) or ()
    for rank, (excess, cap) in enumerate(zip(_excess(plan)(plan.schedule), caps, strict=False)):
        if excess:
            yield f"rank {rank} may need {excess} bytes over its cap of {cap}; plan again"


def _edited(plan: Plan, problem: PlacedProblem) -> Iterator[str]:
    """What the plan says of itself, though its stages and its schedule give something else."""
    caps = plan.options.caps(plan.ranks)
    if predicted(plan.stages, plan.schedule, plan.links, caps, plan.allocator) != plan.prediction:
        yield "the prediction is not what the plan's stages and schedule give: the file was edited; plan again"
    if not _is_placed(plan) or not _is_named_rightly(plan, problem):
        yield "the schedule is not the one that the plan names and its options ask for: the file was edited; plan again"
    if plan.search.values.get("step_ns", plan.prediction.step_ns) != plan.prediction.step_ns:
        yield "the search states another step than the prediction: the file was edited; plan again"
    if plan.ordering is not None and not _is_compared_rightly(plan, plan.ordering, problem):
        yield "the other schedules are not what the plan's stages give: the file was edited; plan again"


def _is_placed(plan: Plan) -> bool:
    wanted = plan.options.stages_per_rank in (None, plan.stages_per_rank)
    return wanted and plan.schedule.placement in placements(plan.options)


def _is_named_rightly(plan: Plan, problem: PlacedProblem) -> bool:
    """A named schedule has the order that its name stands for."""
    name = plan.schedule.name
    if name == "search":
        return True
    if plan.ordering is not None:
        return (
            named_schedule(name, _searched_problem(plan, problem)).compute == plan.schedule.compute
        )
    return named_schedule_within(name, problem, _excess(plan)).compute == plan.schedule.compute


def _searched_problem(plan: Plan, problem: PlacedProblem) -> PlacedProblem:
    """What a search for the order of `plan` begins with."""
    placement, caps = plan.schedule.placement, plan.options.caps(plan.ranks)
    return replace(
        problem,
        caps=activation_caps(
            plan.stages, placement, plan.microbatches, caps, plan.allocator, highest=True
        ),
    )


def _excess(plan: Plan) -> Callable[[Schedule], Sequence[int]]:
    return lambda schedule: excess_of(
        plan.stages, schedule, plan.options.caps(plan.ranks), plan.allocator
    )


def _is_compared_rightly(plan: Plan, ordering: Ordering, problem: PlacedProblem) -> bool:
    """What is said of other orders, beside the one that the plan has."""
    best = min(ordering.named_ns.values(), default=ordering.searched_ns)
    step_ns = ordering.searched_ns if ordering.kept else best
    return (
        (ordering.named_ns, ordering.bound_ns)
        == compared(_searched_problem(plan, problem), _excess(plan))
        and ordering.bound_ns <= ordering.searched_ns <= best
        and plan.prediction.step_ns == step_ns
        and (ordering.kept or plan.schedule.name != "search")
    )


def over_limits(
    plan: Plan,
    *,
    max_imbalance: float | None,
    memory_bytes: int | tuple[int, ...] | None,
    max_bubble: float | None,
    recompute: str | None,
) -> list[str]:
    """Which of the given limits the plan's prediction exceeds, and whether it was made by the policy `recompute`.

    `memory_bytes` is the budget of every rank, or one for each: InputError if there are other ranks.
    """
    loads, found = plan.prediction.loads_ns, []
    imbalance = max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
    if max_imbalance is not None and imbalance > max_imbalance:
        found.append(
            f"imbalance {imbalance:.3f} (largest load / mean load) is over {max_imbalance}"
        )
    if max_bubble is not None and plan.prediction.bubble > max_bubble:
        found.append(
            f"bubble {plan.prediction.bubble:.3f} is over {max_bubble}; more microbatches make it smaller"
        )
    given = () if memory_bytes is None else budgets(memory_bytes, plan.ranks)
    for rank, (memory, budget) in enumerate(zip(plan.prediction.memory, given, strict=False)):
        if memory.total.bound > budget:
            over = f"{memory.total.bound - budget} over its budget of {budget}"
            found.append(
                f"rank {rank} may need {memory.total.bound} bytes, {over}; plan again for that budget"
            )
    if recompute is not None and recompute != plan.options.recompute:
        found.append(
            f"recompute is {plan.options.recompute!r} in the plan, not {recompute!r}; plan again"
        )
    return found
