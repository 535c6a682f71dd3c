"""Is a plan sound by itself, or was its file edited? Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from pipecompile.errors import PipecompileError
from pipecompile.ir.finding import Finding
from pipecompile.ir.plan import (
    Options,
    Ordering,
    Plan,
    Recompute,
)
from pipecompile.ir.schedule import Kind, Schedule
from pipecompile.ir.size import size_text
from pipecompile.ir.stage import Stage
from pipecompile.planner.scheduled_stages import predicted
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.selection import (
    capped_problems,
    named_schedule_within,
    named_steps_and_bound,
    placements,
)
from pipecompile.schedule.stages import excess_bytes, problem_of_plan

__all__ = ["findings"]

EDITED = "the file was edited; plan again"


def findings(plan: Plan) -> list[Finding]:
    """Return what is wrong with a plan by itself: its schedule, its stages, its caps, its
    prediction.

    Empty if it is sound. Later checks rely on earlier ones, so only the first kind that fails is
    reported.
    """
    try:
        # The order is that of trust. A deadlocked schedule has no timeline, so no memory and no
        # prediction can be computed of it; stages that no options allow have a memory that means
        # nothing; and a plan over its cap is the user's to mend, which an edited one is not.
        problem = problem_of_plan(plan)
        # Without caps: `_over_cap` compares them with all that a rank holds.
        faults = check_schedule(plan.schedule, replace(problem, caps=None))
        return (
            [Finding(code="schedule", message=fault) for fault in faults]
            or list(_impossible_stages(plan))
            or list(_over_cap(plan))
            or [Finding(code="edited", message=fault) for fault in _contradictions(plan, problem)]
        )
    except PipecompileError as error:
        return [Finding(code="schedule", message=str(error))]


KINDS: Mapping[Recompute, set[str]] = {
    "auto": {"stage", "except-last", "regions"},
    "block": {"regions"},
    "sqrt": {"regions"},
}
"""How stages may recompute under the policies that are not themselves the name of a kind."""


def _impossible_stages(plan: Plan) -> Iterator[Finding]:
    """Yield the stages that recompute, or encode saved tensors, as no plan with these options
    would.
    """
    for index, stage in enumerate(plan.stages):
        if fault := _fault_of(stage, plan.options) or _fault_of_order(index, plan):
            message = f"stage {index} {fault}: {EDITED}"
            yield Finding(code="stage", message=message, rank=plan.schedule.placement[index])


def _fault_of(stage: Stage, options: Options) -> str | None:
    """Return why no plan with these options has such a stage; None if one may."""
    if stage.recompute not in KINDS.get(options.recompute, {options.recompute}) | {"none"}:
        return f"recomputes by {stage.recompute!r}, but recompute is {options.recompute!r}"
    # What follows are pairs of fields that say the same thing twice. No single one is wrong by
    # itself; an edit of one is found by the other.
    if (stage.recompute == "regions") != bool(stage.regions):
        return f"recomputes by {stage.recompute!r}, but has {len(stage.regions)} regions"
    if stage.recompute == "none" and stage.recompute_ns:
        return f"recomputes nothing, yet takes {stage.recompute_ns} ns for it"
    if stage.recompute_bound_ns > stage.extra_ns:
        return f"takes {stage.extra_ns} ns more, but at least {stage.recompute_bound_ns}"
    encodings = {encoding for run in stage.encoded_runs for encoding in run.encodings}
    if not encodings <= {*options.encodings}:
        return (
            f"encodes by {min(encodings - {*options.encodings})!r}, which the options do not allow"
        )
    return _misplaced_run(stage)


def _fault_of_order(index: int, plan: Plan) -> str | None:
    """Return why no such stage can have its actions; None if it can."""
    stage, schedule = plan.stages[index], plan.schedule
    if stage.recompute == "except-last" and schedule.name == "search":
        return "recomputes by 'except-last', but a searched order treats all microbatches alike"
    splits = any(
        action.stage == index and action.kind is Kind.BACKWARD_INPUT for _, action in schedule
    )
    if splits and stage.regions:
        return "has regions, which are not possible where its backwards are split"
    return None


def _misplaced_run(stage: Stage) -> str | None:
    """Return why the regions and the runs of encoded nodes cannot be those of the stage; None if
    they can be.

    Each is a run of the stage's nodes. Regions lie side by side or one within the other; encoded
    runs lie apart from each other and from all regions.
    """
    encoded = [run.nodes for run in stage.encoded_runs]
    for nodes in chain(stage.regions, encoded):
        # A run is a stretch of the stage's list: of (a, b, c, d) that is b, c but not b, d. It is
        # compared with what lies there from the place of its first node on. If there is no such
        # node, any position will do: the comparison fails.
        first = stage.nodes.index(nodes[0]) if nodes and nodes[0] in stage.nodes else 0
        if not nodes or nodes != stage.nodes[first : first + len(nodes)]:
            name = nodes[0] if nodes else "nothing"
            return f"has {name} … as a region or a run, which is no run of its nodes"
    #     allowed    [a b c d]  with  [b c]      or  [a b]  beside  [c d]
    #     refused    [a b c]    with  [c d e]    c would be recomputed by both
    for one, other in combinations(map(set, stage.regions), 2):
        shared = one & other
        if shared and not (one < other or other < one):
            return f"has {min(shared)} in two regions, neither within the other"
    recomputed = {name for region in stage.regions for name in region}
    for one, other in combinations([*map(set, encoded), recomputed], 2):
        if one & other:
            return f"encodes what {min(one & other)} saves twice, or recomputes it too"
    return None


def _over_cap(plan: Plan) -> Iterator[Finding]:
    """Yield the ranks that may hold more than the plan's options allow."""
    caps = plan.options.caps(plan.ranks) or ()
    for rank, (excess, cap) in enumerate(zip(_excess(plan)(plan.schedule), caps, strict=False)):
        if excess:
            size = size_text(excess)
            message = f"rank {rank} may need {size} over its cap of {size_text(cap)}; plan again"
            yield Finding(code="cap", message=message, rank=rank, value=cap + excess, limit=cap)


def _contradictions(plan: Plan, problem: PlacedProblem) -> Iterator[str]:
    """Yield what the plan says of itself that its stages and its schedule contradict."""
    # All of this is computed once more from stages and rows, which takes milliseconds.
    caps = plan.options.caps(plan.ranks)
    if predicted(plan.stages, plan.schedule, plan.links, caps, plan.allocator) != plan.prediction:
        yield f"the prediction is not what the plan's stages and schedule give: {EDITED}"
    if not _is_placed(plan) or not _has_named_order(plan, problem):
        yield f"the schedule is not the one that the plan names and its options ask for: {EDITED}"
    if plan.search.values.get("step_ns", plan.prediction.step_ns) != plan.prediction.step_ns:
        yield f"the search states another step than the prediction: {EDITED}"
    robustness, step_ns = plan.robustness, plan.prediction.step_ns
    if robustness is not None and robustness.chosen.nominal_ns != step_ns:
        yield f"what the plan says of noise is not about its step: {EDITED}"
    if plan.ordering is not None and not _has_true_comparison(plan, plan.ordering, problem):
        yield f"the other schedules are not what the plan's stages give: {EDITED}"


def _is_placed(plan: Plan) -> bool:
    wanted = plan.options.stages_per_rank in (None, plan.stages_per_rank)
    return wanted and plan.schedule.placement in placements(plan.options)


def _has_named_order(plan: Plan, problem: PlacedProblem) -> bool:
    """Return whether a named schedule has the order that its name stands for."""
    name = plan.schedule.name
    if name == "search":
        return True
    # Not only the name is compared: by hand two rows may be swapped in a way that runs, and that
    # is a schedule of nobody's. The order is made again as the planner makes it, caps included,
    # since with a cap recomputes lie elsewhere.
    order = named_schedule_within(name, *_capped_problems(plan, problem), _excess(plan))
    return order.compute == plan.schedule.compute


def _capped_problems(plan: Plan, problem: PlacedProblem) -> tuple[PlacedProblem, PlacedProblem]:
    """Return the problems under which the plan's order was chosen."""
    caps = plan.options.caps(plan.ranks)
    return capped_problems(problem, plan.stages, caps, plan.allocator)


def _excess(plan: Plan) -> Callable[[Schedule], Sequence[int]]:
    """Return what says by how many bytes each rank exceeds its cap under an order.

    The plan's prediction says it for its own order: `_contradictions` computes that once more.
    """
    caps = plan.options.caps(plan.ranks)

    def excess(schedule: Schedule) -> Sequence[int]:
        if caps is None or schedule.compute != plan.schedule.compute:
            return excess_bytes(plan.stages, schedule, caps, plan.allocator)
        memory = plan.prediction.memory
        return [max(0, rank.total.bound - cap) for rank, cap in zip(memory, caps, strict=True)]

    return excess


def _has_true_comparison(plan: Plan, ordering: Ordering, problem: PlacedProblem) -> bool:
    """Return whether what the plan says of other orders is what its stages give."""
    best = min(ordering.named_ns.values(), default=ordering.searched_ns)
    if ordering.is_in_plan:
        steps_ns = [ordering.searched_ns]
    elif plan.robustness is not None:
        # Under noise another one than the shortest may suffer less.
        steps_ns = list(ordering.named_ns.values())
    else:
        steps_ns = [best]
    return (
        # bound ≤ searched ≤ best named order; and the step of the plan is that of the order that it
        # took.
        (ordering.named_ns, ordering.bound_ns)
        == named_steps_and_bound(*_capped_problems(plan, problem), _excess(plan))
        and ordering.bound_ns <= ordering.searched_ns <= best
        and plan.prediction.step_ns in steps_ns
        and (ordering.is_in_plan or plan.schedule.name != "search")
    )
