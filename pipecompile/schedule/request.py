"""The scheduler alone, on a schedule problem. Needs no PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import BACKWARDS, Action, Kind, Schedule, Timeline
from pipecompile.ir.schedule_problem import NamedOrder, Order, ScheduleProblem
from pipecompile.ir.serialization import read
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named import NAMES, SPLIT, generate, required_placement
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
from pipecompile.schedule.torch_csv import read_csv
from pipecompile.schedule.transfers import add_transfers

__all__ = [
    "PLACEMENTS",
    "ScheduleAnswer",
    "ScheduleRequest",
    "answer",
    "answer_for_plan",
    "schedule",
]

PLACEMENTS = (*SHAPES, "open")


@dataclass(frozen=True)
class ScheduleRequest:
    """What is asked of the scheduler: `search`, a schedule's name, or the order in a CSV of torch's.

    `placement` replaces the ranks in the file; with open the scheduler chooses, as where the file has no ranks.
    `seconds` of work are divided among the placements searched.
    """

    name: str = "search"
    objective: str = "makespan"
    placement: str | None = None
    order: str | Path | None = None
    seconds: float = 5.0

    def __post_init__(self) -> None:
        for what, value, known in (
            ("schedule", self.name, ("search", *NAMES)),
            ("objective", self.objective, OBJECTIVES),
            ("placement", self.placement, (None, *PLACEMENTS)),
        ):
            if value not in known:
                raise InputError(
                    f"{what} {value!r} is not known; choose one of {', '.join(filter(None, known))}"
                )
        if not 0 < self.seconds < inf:
            raise InputError(f"a time limit of {self.seconds:g} s: give a positive number")
        if self.order is not None and self.name != "search":
            raise InputError(
                f"--order {self.order} is an order already: leave --name {self.name} out"
            )


@dataclass(frozen=True)
class ScheduleAnswer:
    """The result for people and files, and what it is made of."""

    order: Order
    schedule: Schedule
    timeline: Timeline
    skips: bool


def schedule(path: str | Path, request: ScheduleRequest) -> Order:
    """An order for the problem in a file; InfeasibleError if none can fit, `fits` false if the one asked for does not.

    ScheduleError if an order that was read is incomplete or can deadlock.
    """
    return answer(path, request).order


def answer(path: str | Path, request: ScheduleRequest) -> ScheduleAnswer:
    """As `schedule`, with the timeline."""
    given, began = read(path, ScheduleProblem), time.perf_counter()
    return _answered(_candidates(given, request), request, began, skips=bool(given.skips))


def answer_for_plan(plan: Plan, request: ScheduleRequest) -> ScheduleAnswer:
    """As `answer`, for the stages of a plan: on its ranks, or placed as the request says."""
    if request.order is not None:
        raise InputError(
            f"--order {request.order}: an order is checked against a schedule problem, not a plan; "
            "name a file with a schedule problem"
        )
    began, problems = time.perf_counter(), _problems_of_plan(plan, request)
    if request.name == "search":
        return _answered(_searched(problems, request), request, began)
    return _answered([_named(problem, request) for problem in problems], request, began)


def _problems_of_plan(plan: Plan, request: ScheduleRequest) -> list[PlacedProblem]:
    """The problems of the placements in question, with the caps that the plan was made for."""
    if request.placement is None:
        return [problem_of_plan(plan)]
    shapes = SHAPES if request.placement == "open" else (request.placement,)
    problems = []
    for placement in dict.fromkeys(
        place(shape, plan.ranks, plan.stages_per_rank) for shape in shapes
    ):
        caps = activation_caps(
            plan.stages,
            placement,
            plan.microbatches,
            plan.options.caps(plan.ranks),
            plan.allocator,
        )
        problems.append(
            problem_of_stages(plan.stages, plan.links, placement, plan.microbatches, caps)
        )
    return problems


def _answered(
    candidates: Sequence[_PlacementCandidate],
    request: ScheduleRequest,
    began: float,
    *,
    skips: bool = False,
) -> ScheduleAnswer:
    """The best of the candidates, and what compares with it; `began` is when the work on them did."""
    best = min(candidates, key=lambda candidate: (candidate.over_bytes, candidate.value_ns))
    violations = _violations(best)
    named = tuple(order for candidate in candidates for order in _compared(candidate))
    bounds = [candidate.bound_ns for candidate in candidates if candidate.bound_ns is not None]
    bound, timeline = min(bounds, default=None), best.timeline
    order = Order(
        asked="csv" if request.order is not None else request.name,
        name=best.schedule.name,
        weight_versions=best.schedule.weight_versions,
        microbatches=best.schedule.microbatches,
        placement=best.schedule.placement,
        shape=_shape(best.schedule.placement),
        orders=best.schedule.actions,
        objective=request.objective,
        makespan_ns=timeline.makespan_ns,
        span_ns=timeline.span_ns,
        lower_bound_ns=bound,
        proven=not best.over_bytes and best.value_ns == bound,
        bubble=timeline.bubble,
        idle=timeline.idle,
        peak_bytes=timeline.peak_bytes,
        memory_bytes=best.problem.caps,
        fits=not best.over_bytes,
        violations=tuple(violations),
        best_named=_best(named),
        named=named,
        seconds=round(time.perf_counter() - began, 3),
    )
    return ScheduleAnswer(order, best.schedule, timeline, skips)


@dataclass(frozen=True)
class _PlacementCandidate:
    """A schedule on one placement, and what compares with it; no bound where there is nothing to bound."""

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


def _candidates(given: ScheduleProblem, request: ScheduleRequest) -> list[_PlacementCandidate]:
    """One for each placement in question; at least one."""
    if request.order is not None:
        found = _read_order(given, request, Path(request.order))
        try:
            return [_simulated(placed_problem(given, found.placement), found, request.objective)]
        except ScheduleError as error:
            raise ScheduleError(f"{request.order}: {error}") from None
    placements = _placements(given, request)
    if request.name != "search":
        return [_named(placed_problem(given, placement), request) for placement in placements]
    return _searched([placed_problem(given, placement) for placement in placements], request)


def _placements(given: ScheduleProblem, request: ScheduleRequest) -> list[tuple[int, ...]]:
    """That of the file, or of the request; all that differ and that the schedule can have, if it is left open."""
    if request.placement is None and given.placement is not None:
        return [given.placement]
    stages_per_rank, rest = divmod(len(given.stages), given.ranks)
    if rest:
        raise InputError(
            f"{len(given.stages)} stages cannot lie evenly on {given.ranks} ranks; "
            "give each stage its rank in the file, and leave --placement out"
        )
    needed = "any" if request.name == "search" else required_placement(request.name)[0]
    shapes: Sequence[str] = SHAPES if needed == "any" else (needed,)
    if request.placement not in (None, "open"):
        shapes = (str(request.placement),)
    return list(dict.fromkeys(place(shape, given.ranks, stages_per_rank) for shape in shapes))


def _shape(placement: Sequence[int]) -> str:
    return next(iter(shapes_of(placement)), "own")


def _read_order(given: ScheduleProblem, request: ScheduleRequest, path: Path) -> Schedule:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})"
        ) from error
    try:
        found = read_csv(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    theirs = (len(found.placement), found.ranks, found.microbatches)
    ours = (len(given.stages), given.ranks, given.microbatches)
    if theirs != ours:
        words = [
            "{} stages on {} ranks and {} microbatches".format(*sizes) for sizes in (theirs, ours)
        ]
        raise InputError(f"{path} orders {words[0]}, but the problem has {words[1]}")
    left_open = request.placement == "open" or (
        request.placement is None and given.placement is None
    )
    if not left_open and found.placement not in _placements(given, request):
        ranks = " ".join(map(str, found.placement))
        raise InputError(
            f"{path} has the stages on ranks {ranks}, but the problem has not; use --placement open"
        )
    missing = list(_missing(found))
    if missing:
        rank, more = (
            found.placement[missing[0].stage],
            f" and {len(missing) - 1} more" if len(missing) > 1 else "",
        )
        raise ScheduleError(
            f"{path}: rank {rank}: {missing[0]} is missing{more}; a stage does F and B, or F, I and W"
        )
    return found


def _missing(found: Schedule) -> Iterator[Action]:
    """The actions without which an order that was read is no training step."""
    there = {action for row in found.rows for action in row}
    for stage, microbatch in product(range(len(found.placement)), range(found.microbatches)):
        halves = {
            Action(stage, kind, microbatch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        }
        backward = halves if halves & there else {Action(stage, Kind.BACKWARD, microbatch)}
        yield from sorted({Action(stage, Kind.FORWARD, microbatch), *backward} - there)


def _named(problem: PlacedProblem, request: ScheduleRequest) -> _PlacementCandidate:
    if request.name in SPLIT and not problem.can_split:
        raise InputError(
            f"schedule {request.name!r} has backwards in halves, but the problem says split_backward false; "
            "choose one without, such as 1f1b"
        )
    found = add_recomputes(problem, generate(request.name, problem.placement, problem.microbatches))
    return _simulated(problem, found, request.objective)


def _simulated(problem: PlacedProblem, found: Schedule, objective: str) -> _PlacementCandidate:
    """With a bound if it is a whole step: without backwards less is done, and without a flush no step ends."""
    whole = found.weight_versions == "synchronous" and any(
        action.kind in BACKWARDS for _, action in found
    )
    bound = order_lower_bound(problem, objective) if whole else None
    named = tuple(simulate_named(problem, objective)) if whole else ()
    return _PlacementCandidate(problem, found, simulate(problem, found), objective, bound, named)


def _searched(
    problems: Sequence[PlacedProblem], request: ScheduleRequest
) -> list[_PlacementCandidate]:
    """What the search finds on each placement, but for those on which nothing fits."""
    candidates, refused = [], []
    for problem in problems:
        try:
            found = search(
                problem, objective=request.objective, seconds=request.seconds / len(problems)
            )
        except InfeasibleError as error:
            refused.append(
                f"{_shape(problem.placement)}: {error}" if len(problems) > 1 else str(error)
            )
            continue
        timeline = simulate(problem, found.schedule)
        candidates.append(
            _PlacementCandidate(
                problem, found.schedule, timeline, request.objective, found.bound_ns, found.named
            )
        )
    if not candidates:
        raise InfeasibleError("; ".join(refused))
    return candidates


def _compared(candidate: _PlacementCandidate) -> Iterator[NamedOrder]:
    for order in candidate.named:
        yield NamedOrder(
            name=order.schedule.name,
            shape=_shape(candidate.problem.placement),
            value_ns=order.value_ns,
            peak_bytes=max(order.peak_bytes),
            over_bytes=_over_bytes(candidate.problem, order.peak_bytes),
        )


def _best(named: Sequence[NamedOrder]) -> NamedOrder | None:
    """The shortest of those that fit; of equals the one that holds least."""
    within = (order for order in named if not order.over_bytes)
    return min(within, key=lambda order: (order.value_ns, order.peak_bytes), default=None)


def _over_bytes(problem: PlacedProblem, peaks: Sequence[int]) -> int:
    """By how much the rank that is most over its cap is over it."""
    return max(0, *(peak - cap for peak, cap in zip(peaks, problem.caps or peaks, strict=True)))


def _violations(candidate: _PlacementCandidate) -> list[str]:
    """By how much which rank is over its cap, and nothing else: ScheduleError if there is more."""
    problem = _relayed(candidate.problem)
    lowered = add_transfers(problem, candidate.schedule)
    found = check_schedule(lowered, problem)
    faults = (
        check_schedule(lowered, replace(problem, caps=None))
        if found and candidate.over_bytes
        else found
    )
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ScheduleError(f"the order cannot be run: {'; '.join(faults[:3])}{more}")
    return found


def _relayed(problem: PlacedProblem) -> PlacedProblem:
    """`problem` without messages over skips, which cannot be lowered; what is held for them stays."""
    held = [0] * problem.stages
    for skip in problem.skips:
        held[skip.source] += skip.bytes
    costs = tuple(
        replace(w, kept_bytes=w.kept_bytes + size)
        for w, size in zip(problem.costs, held, strict=True)
    )
    return replace(problem, skips=(), costs=costs)
