"""Selects for a plan where its stages lie, and which order its ranks follow. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.links import Links
from pipecompile.ir.option_names import known_name
from pipecompile.ir.plan import Options, Ordering, Plan
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.size import size_text
from pipecompile.ir.stage import Stage
from pipecompile.ir.stage_ranks import placement_of
from pipecompile.memory_model.snapshots import Snapshot
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import (
    NAMES,
    SPLIT,
    FullestMoment,
    fitting_names,
    fullest_moment,
    generate,
    lasting_microbatches,
    peak_in_flight,
    required_placement,
    steady_microbatches,
)
from pipecompile.schedule.placement import SHAPES, place, shapes_of
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.receives import add_earliest_receives
from pipecompile.schedule.recompute import add_recomputes
from pipecompile.schedule.robustness import is_gain_robust
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.snapshots_in_flight import snapshots_by_rank
from pipecompile.schedule.stages import activation_caps, excess_bytes, problem_of_stages
from pipecompile.schedule.transfers import add_transfers

if TYPE_CHECKING:
    from pipecompile.schedule.search import NamedResult, SearchResult

__all__ = [
    "capped_problems",
    "fullest_moment_of",
    "in_flight_counts",
    "judging_schedule",
    "named_order_of",
    "named_schedule",
    "named_schedule_within",
    "named_steps_and_bound",
    "placements",
    "representative_schedule",
    "schedule_plan",
    "snapshots_of",
]

RELIEF = "give more memory, more ranks, smaller microbatches, or recompute auto"
SEARCH_SECONDS = 3.0  # the budget of one search
SEARCHES = 4  # tried while the caps are lowered
Excess = Callable[[Schedule], Sequence[int]]
"""Returns for each rank the bytes by which a schedule exceeds its cap."""


def placements(options: Options) -> tuple[tuple[int, ...], ...]:
    """Return where the stages may lie: one placement, or several for a search to choose from.

    InputError if the options disagree.
    """
    name = known_name("schedule", options.schedule, [*NAMES, "search"])
    shape, required = ("any", None) if name == "search" else required_placement(name)
    if options.stage_replicas is not None:
        return (placement_of(options.stage_replicas),)
    stages_per_rank = options.stages_per_rank or required or (2 if shape == "loop" else 1)
    if options.k % stages_per_rank:
        raise InputError(_unfilled_ranks(options, stages_per_rank))
    ranks = options.k // stages_per_rank
    if name == "search" and options.placement is None:
        return tuple(dict.fromkeys(place(shape, ranks, stages_per_rank) for shape in SHAPES))
    # A placement that the schedule cannot have is refused when it is generated.
    default = "linear" if shape == "any" else shape
    return (place(options.placement or default, ranks, stages_per_rank),)


def _unfilled_ranks(options: Options, stages_per_rank: int) -> str:
    """Return what to do about stages that do not fill whole ranks.

    The advice names both numbers, since k counts stages and users may think of ranks.
    """
    k, source = options.k, f"schedule {options.schedule!r}"
    if options.stages_per_rank:
        source = f"stages_per_rank={stages_per_rank}"
    # Rounded up: with 2 stages on a rank k=3 is nearest to k=4, which gives 2 ranks.
    ranks = -(-k // stages_per_rank)
    return (
        f"k={k} stages do not fill their ranks: {source} places {stages_per_rank} stages on a "
        f"rank, so k={ranks * stages_per_rank} gives {_ranks_text(ranks)}; for {_ranks_text(k)} "
        f"use k={k * stages_per_rank}"
    )


def _ranks_text(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def representative_schedule(options: Options, placement: Sequence[int]) -> str:
    """Return the named schedule by which cuts are judged while the order is not yet searched."""
    if options.schedule != "search":
        return options.schedule
    shapes = shapes_of(placement)
    # With one stage on each rank every shape is linear.
    if "linear" in shapes:
        return "1f1b"
    return "zb-v" if "v" in shapes else "interleaved-1f1b"


def in_flight_counts(options: Options, placement: Sequence[int]) -> tuple[int, ...]:
    """Return for each stage how many microbatches it holds between forward and backward."""
    name = representative_schedule(options, placement)
    lasting = lasting_microbatches(name, placement, options.microbatches)
    return peak_in_flight(name, placement, lasting)


def fullest_moment_of(options: Options, placement: Sequence[int]) -> FullestMoment:
    """Return what stages hold at once when their ranks hold the most microbatches."""
    name = representative_schedule(options, placement)
    lasting = lasting_microbatches(name, placement, options.microbatches)
    return fullest_moment(name, placement, lasting)


@lru_cache(maxsize=8)
def snapshots_of(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    recompute: bool,
    except_last: bool = False,
) -> tuple[tuple[Snapshot, ...], ...]:
    """Return for each rank the snapshots of a named schedule at which it may hold the most.

    `recompute` says that its stages recompute, `except_last` that the step's last microbatch is not
    recomputed.
    """
    steady = steady_microbatches(name, placement, microbatches)
    schedule = generate(name, placement, steady, recompute, except_last=except_last)
    # No times are known yet: messages count as received as early as they may be.
    return snapshots_by_rank(add_earliest_receives(schedule), microbatches)


def named_schedule(name: str, problem: PlacedProblem) -> Schedule:
    """Return the compute actions of a named schedule, each recompute as early as memory allows."""
    if name in SPLIT and not problem.can_split:
        whole = (known for known in fitting_names(problem.placement, 1) if known not in SPLIT)
        raise InputError(
            f"schedule {name!r} splits backwards in two, but the costs do not say how long each "
            f"half takes; choose other costs, or one of {', '.join(whole)}"
        )
    return add_recomputes(problem, generate(name, problem.placement, problem.microbatches))


def judging_schedule(options: Options, problem: PlacedProblem) -> Schedule:
    """Return the named order by which a cut is judged.

    Of a search it is one that the stages can have: regions are recomputed within a backward, which
    is then not split, and a V of whole backwards has no order but gpipe.
    """
    name = representative_schedule(options, problem.placement)
    if options.schedule == "search" and name in SPLIT and not problem.can_split:
        possible = fitting_names(problem.placement, problem.microbatches)
        name = next(known for known in possible if known not in SPLIT)
    return named_schedule(name, problem)


def named_order_of(plan: Plan, name: str) -> Schedule:
    """Return the named order of a searched plan's stages, with its transfers.

    It is that which the search compared with others, and so one of `plan.ordering.named_ns`.
    """
    placement, microbatches = plan.schedule.placement, plan.microbatches
    problem = problem_of_stages(plan.stages, plan.links, placement, microbatches)
    caps = plan.options.caps(plan.ranks)

    def excess(schedule: Schedule) -> tuple[int, ...]:
        return excess_bytes(plan.stages, schedule, caps, plan.allocator)

    highest, safe = capped_problems(problem, plan.stages, caps, plan.allocator)
    return add_transfers(problem, named_schedule_within(name, highest, safe, excess))


def schedule_plan(
    options: Options,
    stages: Sequence[Stage],
    links: Links,
    placement: Sequence[int],
    allocator: AllocatorName,
) -> tuple[Schedule, Ordering | None]:
    """Return the schedule of a plan with its transfers, and what a search found, if there was one.

    By the memory model its ranks hold at most `options.memory_bytes`. InfeasibleError if no such
    schedule is found; AssertionError if the schedule is not sound.
    """
    problem = problem_of_stages(stages, links, placement, options.microbatches)
    caps = options.caps(max(placement) + 1)

    def excess(schedule: Schedule) -> tuple[int, ...]:
        return excess_bytes(stages, schedule, caps, allocator)

    highest, safe = capped_problems(problem, stages, caps, allocator)
    ordering = None
    if options.schedule == "search":
        compute, ordering = _searched(highest, safe, excess)
    else:
        compute = named_schedule_within(options.schedule, highest, safe, excess)
    schedule = add_transfers(problem, compute)
    # `problem` has no caps: memory is judged by the memory model, in `excess`.
    violations = check_schedule(schedule, problem)
    assert not violations, f"the schedule is not sound: {violations}"
    return schedule, ordering


def capped_problems(
    problem: PlacedProblem,
    stages: Sequence[Stage],
    caps: Sequence[int] | None,
    allocator: AllocatorName,
) -> tuple[PlacedProblem, PlacedProblem]:
    """Return the problem of stages under two kinds of caps on activations.

    No order that fits exceeds those of the first; every order within those of the second fits.
    """
    highest, safe = (
        activation_caps(
            stages, problem.placement, problem.microbatches, caps, allocator, highest=is_highest
        )
        for is_highest in (True, False)
    )
    return replace(problem, caps=highest), replace(problem, caps=safe)


def named_schedule_within(
    name: str, highest: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> Schedule:
    """Return the named order with each recompute as early as memory allows.

    Where that does not fit, each recompute is right before its backward; InfeasibleError if that
    does not fit either. The problems are those of `capped_problems`.
    """
    problems = (highest, safe) if any(safe.recompute) else (safe,)
    early = [named_schedule(name, problem) for problem in problems]
    fitting = [schedule for schedule in early if not any(excess(schedule))]
    if fitting:
        return min(fitting, key=lambda schedule: simulate(safe, schedule).makespan_ns)
    late = generate(
        name,
        safe.placement,
        safe.microbatches,
        safe.recompute,
        except_last=[costs.except_last for costs in safe.costs],
    )
    if not any(excess(late)):
        return late
    over = ", ".join(
        f"rank {rank} by {size_text(size)}" for rank, size in enumerate(excess(late)) if size
    )
    raise InfeasibleError(
        f"no cut was found whose ranks fit their memory under {name!r}; whether there is one is "
        f"not proven. The last one tried is over its cap on {over}",
        RELIEF,
    )


def _searched(
    problem: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> tuple[Schedule, Ordering]:
    """Return the best order found if its gain over the best named one survives noise, else that.

    No order that fits exceeds the caps of `problem`; every order within those of `safe` fits.
    """
    # Imported here because it may need CP-SAT, which takes a while to load.
    from pipecompile.schedule.search import best_named, order_lower_bound

    all_named = tuple(_named_results(problem, safe, excess))
    named = best_named(all_named)
    # A search treats all microbatches alike.
    spares_last = any(costs.except_last for costs in problem.costs)
    results = () if spares_last else _fitting_results(problem, safe, excess)
    result = min(results, key=lambda candidate: candidate.value_ns, default=None)
    chosen = _preferred(problem, result, named)
    ordering = Ordering(
        searched_ns=min(order.value_ns for order in (result, named) if order is not None),
        bound_ns=order_lower_bound(problem, "makespan"),
        named_ns=_steps_ns(all_named),
        is_in_plan=chosen is result,
    )
    return chosen.schedule, ordering


def _preferred(
    problem: PlacedProblem, result: SearchResult | None, named: NamedResult | None
) -> SearchResult | NamedResult:
    if named is None:
        if result is None:
            raise InfeasibleError(
                "no order was found whose ranks fit their memory; whether there is one is not "
                "proven",
                RELIEF,
            )
        return result
    if result is None or result.value_ns >= named.value_ns:
        return named
    return result if is_gain_robust(problem, result.schedule, named.schedule) else named


def _fitting_results(
    problem: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> Iterator[SearchResult]:
    """Yield searched orders that fit.

    An order within the caps of `problem` may still need too much. The caps are then lowered to what
    the order held, less its excess, and the search is repeated.
    """
    from pipecompile.schedule.search import search

    lowered = problem
    # What else a rank holds depends on where its peak is, so no cap on activations is exact:
    # that of `problem` leaves too much room in some orders, that of `safe` too little in most.
    # A cap that is lowered by what was exceeded lies between, and is tried before the safe one.
    for _ in range(SEARCHES):
        try:
            result = search(lowered, seconds=SEARCH_SECONDS)
        except InfeasibleError:
            break
        over = excess(result.schedule)
        if not any(over):
            yield result
            break
        caps = list(lowered.caps or ())
        for rank, (row, more) in enumerate(zip(result.schedule.compute, over, strict=True)):
            # The rank must hold less than it did, by what it exceeded.
            if more:
                caps[rank] = max(0, max(lowered.held_bytes(row)) - more)
        lowered = replace(lowered, caps=tuple(caps))
    if lowered != problem:
        with suppress(InfeasibleError):
            result = search(safe, seconds=SEARCH_SECONDS)
            # A recompute may have been moved to where its rank has less memory left.
            if not any(excess(result.schedule)):
                yield result


def _named_results(
    highest: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> Iterator[NamedResult]:
    """Yield the named orders of a placement whose ranks are within their memory."""
    from pipecompile.schedule.search import NamedResult

    for name in fitting_names(safe.placement, safe.microbatches):
        if name in SPLIT and not safe.can_split:
            continue
        with suppress(InfeasibleError):
            schedule = named_schedule_within(name, highest, safe, excess)
            timeline = simulate(safe, schedule)
            yield NamedResult(schedule, timeline.makespan_ns, timeline.peak_bytes, fits=True)


def named_steps_and_bound(
    highest: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> tuple[dict[str, int], int]:
    """Return the steps in ns of the named orders that fit, and the lower bound on all orders.

    A searched plan states both. The problems are those of `capped_problems`.
    """
    from pipecompile.schedule.search import order_lower_bound

    named = _named_results(highest, safe, excess)
    return _steps_ns(named), order_lower_bound(highest, "makespan")


def _steps_ns(results: Iterable[NamedResult]) -> dict[str, int]:
    return {named.schedule.name: named.value_ns for named in results}
