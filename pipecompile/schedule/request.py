"""The scheduler alone: answers a schedule problem in a file, or the stages of a plan.

`pipecompile schedule` calls it. Needs no PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.option_names import known_name
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import BACKWARDS, Schedule, Timeline
from pipecompile.ir.schedule_problem import NamedOrder, Order, ScheduleProblem
from pipecompile.ir.serialization import read
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import NAMES, SPLIT, generate, required_placement
from pipecompile.schedule.order_file import read_order
from pipecompile.schedule.placement import SHAPES, place, shapes_of
from pipecompile.schedule.problem import PlacedProblem, placed_problem
from pipecompile.schedule.recompute import add_recomputes
from pipecompile.schedule.search import (
    OBJECTIVES,
    NamedResult,
    order_lower_bound,
    search,
    simulate_named,
)
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import activation_caps, problem_of_plan, problem_of_stages
from pipecompile.schedule.transfers import add_transfers

__all__ = [
    "PLACEMENTS",
    "ScheduleAnswer",
    "ScheduleRequest",
    "answer_for_file",
    "answer_for_plan",
]

PLACEMENTS = (*SHAPES, "open")


@dataclass(frozen=True)
class ScheduleRequest:
    """What the scheduler is asked for: a search, a named schedule, or the check of an order.

    `name` is search or the name of a schedule. `order` is a CSV of torch's to check and simulate
    instead. `placement` replaces the ranks in the file; with open the scheduler chooses them, as it
    does where the file has none. `seconds` is the budget of a search, divided among the placements.
    Names may be in any case; InputError suggests the nearest one.
    """

    name: str = "search"
    objective: str = "makespan"
    placement: str | None = None
    order: str | Path | None = None
    seconds: float = 5.0

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "name", known_name("schedule", self.name, ("search", *NAMES)))
        set_field(self, "objective", known_name("objective", self.objective, OBJECTIVES))
        if self.placement is not None:
            set_field(self, "placement", known_name("placement", self.placement, PLACEMENTS))
        if not 0 < self.seconds < inf:
            raise InputError(f"a time limit of {self.seconds:g} s: give a positive number")
        if self.order is not None and self.name != "search":
            raise InputError(
                f"--order {self.order} is an order already: leave --name {self.name} out"
            )


@dataclass(frozen=True)
class ScheduleAnswer:
    """The answer for people and files, and the schedule and timeline that it describes.

    `skips` says whether the problem has tensors that skip stages. Times are in `time_unit`.
    """

    order: Order
    schedule: Schedule
    timeline: Timeline
    skips: bool
    time_unit: TimeUnit = "ns"


def answer_for_file(path: str | Path, request: ScheduleRequest) -> ScheduleAnswer:
    """Return an order for the schedule problem in a file.

    Its `fits` is false if a requested order does not fit. InfeasibleError if none can fit;
    ScheduleError if an order that was read is incomplete or can deadlock.
    """
    problem, began = read(path, ScheduleProblem), time.perf_counter()
    candidates = _candidates(problem, request)
    return _best_answer(candidates, request, began, skips=bool(problem.skips))


def answer_for_plan(plan: Plan, request: ScheduleRequest) -> ScheduleAnswer:
    """Return an order for the stages of a plan: on its ranks, or placed as the request says.

    Errors are those of `answer_for_file`.
    """
    if request.order is not None:
        raise InputError(
            f"--order {request.order}: an order is checked against a schedule problem, not a plan; "
            "name a file with a schedule problem"
        )
    began, problems = time.perf_counter(), _problems_of_plan(plan, request)
    answer = _best_answer(_candidates_on(problems, request), request, began)
    return replace(answer, time_unit=plan.time_unit)


@dataclass(frozen=True)
class _PlacementCandidate:
    """A schedule on one placement, and the lower bound and named schedules to compare it with.

    `bound_ns` is None where a bound has no meaning.
    """

    problem: PlacedProblem
    schedule: Schedule
    timeline: Timeline
    objective: str
    bound_ns: int | None
    named: tuple[NamedResult, ...]

    @property
    def value_ns(self) -> int:
        return self.timeline.makespan_ns if self.objective == "makespan" else self.timeline.span_ns

    @property
    def over_bytes(self) -> int:
        return _over_bytes(self.problem, self.timeline.peak_bytes)


def _best_answer(
    candidates: Sequence[_PlacementCandidate],
    request: ScheduleRequest,
    began: float,
    *,
    skips: bool = False,
) -> ScheduleAnswer:
    """Return the best of the candidates; `began` is when the work on them began."""
    # An order that fits is better than any that does not.
    # Of those that do not fit the one that is over by the least, so that the answer is also a hint.
    best = min(candidates, key=lambda candidate: (candidate.over_bytes, candidate.value_ns))
    violations = _memory_violations(best)
    named = tuple(order for candidate in candidates for order in _named_orders(candidate))
    bounds = [candidate.bound_ns for candidate in candidates if candidate.bound_ns is not None]
    # The smallest one holds for all placements together.
    bound_ns, timeline = min(bounds, default=None), best.timeline
    order = Order(
        request="csv" if request.order is not None else request.name,
        name=best.schedule.name,
        weight_versions=best.schedule.weight_versions,
        microbatches=best.schedule.microbatches,
        placement=best.schedule.placement,
        placement_shape=_placement_shape(best.schedule.placement),
        orders=best.schedule.actions,
        objective=request.objective,
        makespan_ns=timeline.makespan_ns,
        span_ns=timeline.span_ns,
        lower_bound_ns=bound_ns,
        proven=not best.over_bytes and best.value_ns == bound_ns,
        bubble=timeline.bubble,
        idle=timeline.idle,
        peak_bytes=timeline.peak_bytes,
        memory_bytes=best.problem.caps,
        fits=not best.over_bytes,
        violations=tuple(violations),
        best_named=_best_named(named),
        named=named,
        seconds=round(time.perf_counter() - began, 3),
    )
    return ScheduleAnswer(order, best.schedule, timeline, skips)


def _candidates(problem: ScheduleProblem, request: ScheduleRequest) -> list[_PlacementCandidate]:
    """Return one candidate for each allowed placement; at least one."""
    if request.order is not None:
        return [_candidate_of_order(problem, request, Path(request.order))]
    placements = _placements(problem, request)
    return _candidates_on([placed_problem(problem, each) for each in placements], request)


def _candidates_on(
    problems: Sequence[PlacedProblem], request: ScheduleRequest
) -> list[_PlacementCandidate]:
    if request.name == "search":
        return _searched(problems, request)
    return [_named_candidate(problem, request) for problem in problems]


def _candidate_of_order(
    problem: ScheduleProblem, request: ScheduleRequest, path: Path
) -> _PlacementCandidate:
    """Return the order in the file at `path`, simulated; errors begin with the path."""
    order = read_order(path, problem)
    is_open = request.placement == "open" or (
        request.placement is None and problem.placement is None
    )
    if not is_open and order.placement not in _placements(problem, request):
        ranks = " ".join(map(str, order.placement))
        raise InputError(
            f"{path} has the stages on ranks {ranks}, but the problem has not; use --placement open"
        )
    try:
        return _simulated(placed_problem(problem, order.placement), order, request.objective)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _placements(problem: ScheduleProblem, request: ScheduleRequest) -> list[tuple[int, ...]]:
    """Return the placement of the file or of the request.

    Where it is left open these are all distinct ones that the schedule can have.
    """
    if request.placement is None and problem.placement is not None:
        return [problem.placement]
    stages_per_rank, rest = divmod(len(problem.stages), problem.ranks)
    if rest:
        raise InputError(
            f"{len(problem.stages)} stages cannot lie evenly on {problem.ranks} ranks; "
            "give each stage its rank in the file, and leave --placement out"
        )
    required = "any" if request.name == "search" else required_placement(request.name)[0]
    shapes = SHAPES if required == "any" else (required,)
    if request.placement not in (None, "open"):
        shapes = (str(request.placement),)
    return list(dict.fromkeys(place(shape, problem.ranks, stages_per_rank) for shape in shapes))


def _problems_of_plan(plan: Plan, request: ScheduleRequest) -> list[PlacedProblem]:
    """Return the problems of the allowed placements, with the caps that the plan was made for."""
    if request.placement is None:
        return [problem_of_plan(plan)]
    shapes = SHAPES if request.placement == "open" else (request.placement,)
    caps, problems = plan.options.caps(plan.ranks), []
    for placement in dict.fromkeys(
        place(shape, plan.ranks, plan.stages_per_rank) for shape in shapes
    ):
        available = activation_caps(plan.stages, placement, plan.microbatches, caps, plan.allocator)
        problems.append(
            problem_of_stages(plan.stages, plan.links, placement, plan.microbatches, available)
        )
    return problems


def _placement_shape(placement: Sequence[int]) -> str:
    return next(iter(shapes_of(placement)), "own")


def _named_candidate(problem: PlacedProblem, request: ScheduleRequest) -> _PlacementCandidate:
    if request.name in SPLIT and not problem.can_split:
        raise InputError(
            f"schedule {request.name!r} has backwards in halves, but the problem says "
            "split_backward false; choose one without, such as 1f1b"
        )
    schedule = generate(request.name, problem.placement, problem.microbatches)
    return _simulated(problem, add_recomputes(problem, schedule), request.objective)


def _simulated(problem: PlacedProblem, schedule: Schedule, objective: str) -> _PlacementCandidate:
    """Return a schedule with what it is compared with, if that has a meaning.

    Without backwards a schedule does less than others, and without a flush no step ends.
    """
    trains = any(action.kind in BACKWARDS for _, action in schedule)
    timeline = simulate(problem, schedule)
    if not trains or schedule.weight_versions != "synchronous":
        return _PlacementCandidate(problem, schedule, timeline, objective, None, ())
    bound_ns = order_lower_bound(problem, objective)
    named = tuple(simulate_named(problem, objective))
    return _PlacementCandidate(problem, schedule, timeline, objective, bound_ns, named)


def _searched(
    problems: Sequence[PlacedProblem], request: ScheduleRequest
) -> list[_PlacementCandidate]:
    """Return what the search finds on each placement; InfeasibleError if nothing fits on any."""
    candidates, refusals = [], []
    for problem in problems:
        try:
            # The budget is divided, and not used up by the first placement: the
            # order in which placements are tried must not decide which of them wins.
            result = search(
                problem, objective=request.objective, seconds=request.seconds / len(problems)
            )
        except InfeasibleError as error:
            shape = f"{_placement_shape(problem.placement)}: " if len(problems) > 1 else ""
            refusals.append(f"{shape}{error}")
            continue
        timeline = simulate(problem, result.schedule)
        candidates.append(
            _PlacementCandidate(
                problem,
                result.schedule,
                timeline,
                request.objective,
                result.bound_ns,
                result.named,
            )
        )
    if not candidates:
        raise InfeasibleError("; ".join(refusals))
    return candidates


def _named_orders(candidate: _PlacementCandidate) -> Iterator[NamedOrder]:
    for named in candidate.named:
        yield NamedOrder(
            name=named.schedule.name,
            placement_shape=_placement_shape(candidate.problem.placement),
            value_ns=named.value_ns,
            peak_bytes=max(named.peak_bytes),
            over_bytes=_over_bytes(candidate.problem, named.peak_bytes),
        )


def _best_named(named: Sequence[NamedOrder]) -> NamedOrder | None:
    """Return the shortest of those that fit; of equal ones that which holds least."""
    fitting = (order for order in named if not order.over_bytes)
    return min(fitting, key=lambda order: (order.value_ns, order.peak_bytes), default=None)


def _over_bytes(problem: PlacedProblem, peaks: Sequence[int]) -> int:
    """Return by how much the worst rank exceeds its cap; 0 if none does."""
    return max(0, *(peak - cap for peak, cap in zip(peaks, problem.caps or peaks, strict=True)))


def _memory_violations(candidate: _PlacementCandidate) -> list[str]:
    """Return which ranks exceed their caps; ScheduleError if anything else is wrong."""
    # torch has no messages for skips, but the rest of the order can be checked.
    problem = _without_skips(candidate.problem)
    schedule = add_transfers(problem, candidate.schedule)
    violations = faults = check_schedule(schedule, problem)
    if violations and candidate.over_bytes:
        # Orders over their caps are reported, as the user may want to see by how much; whatever
        # else is wrong is an error, and the caps may have kept the check from coming to it.
        faults = check_schedule(schedule, replace(problem, caps=None))
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ScheduleError(f"the order cannot be run: {'; '.join(faults[:3])}{more}")
    return violations


def _without_skips(problem: PlacedProblem) -> PlacedProblem:
    """Return the problem without skips, which have no message; what is held for them stays."""
    skipped_bytes = [0] * problem.stages
    for skip in problem.skips:
        skipped_bytes[skip.source] += skip.bytes
    costs = tuple(
        replace(stage, kept_bytes=stage.kept_bytes + size)
        for stage, size in zip(problem.costs, skipped_bytes, strict=True)
    )
    return replace(problem, skips=(), costs=costs)
