"""Where the stages of a plan lie, and which rank does what, when. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options, Ordering, Stage
from pipecompile.ir.schedule import Schedule
from pipecompile.memory_model.snapshots import Moment, moments
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named import (
    ASYNCHRONOUS,
    NAMES,
    SPLIT,
    fitting_names,
    generate,
    peak_in_flight,
    required_placement,
)
from pipecompile.schedule.placement import SHAPES, place, shapes_of
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.recompute import add_recomputes
from pipecompile.schedule.robustness import is_gain_robust
from pipecompile.schedule.stages import activation_caps, excess_of, problem_of_stages
from pipecompile.schedule.transfers import add_transfers

if TYPE_CHECKING:
    from pipecompile.schedule.search import NamedResult, SearchResult

__all__ = [
    "compared",
    "in_flight_counts",
    "snapshots_of",
    "named_schedule",
    "named_schedule_within",
    "schedule_plan",
    "placements",
    "representative_schedule",
]

SEARCH_SECONDS = 3.0  # of work
SEARCHES = 4  # as caps are lowered
Excess = Callable[[Schedule], Sequence[int]]  # per rank the bytes over its cap


def placements(options: Options) -> tuple[tuple[int, ...], ...]:
    """Where the stages may lie: one way, or several where a search may choose; InputError if the options disagree."""
    known = [name for name in NAMES if name not in ASYNCHRONOUS]
    if options.schedule not in (*NAMES, "search"):
        raise InputError(
            f"schedule {options.schedule!r} is not known; choose one of {', '.join(known)}, search"
        )
    if options.schedule in ASYNCHRONOUS:
        raise InputError(
            f"schedule {options.schedule!r} updates weights while microbatches are on their way, which no step does "
            "yet; choose a synchronous one such as '1f1b', or look at it with `pipecompile schedule`"
        )
    searched = options.schedule == "search"
    shape, fixed = ("any", None) if searched else required_placement(options.schedule)
    each = options.stages_per_rank or fixed or (2 if shape == "loop" else 1)
    if options.k % each:
        raise InputError(
            f"k={options.k} stages cannot be placed {each} on a rank; choose k as a multiple of {each}"
        )
    ranks = options.k // each
    if searched and options.placement is None:
        return tuple(dict.fromkeys(place(shape, ranks, each) for shape in SHAPES))
    return (place(options.placement or ("linear" if shape == "any" else shape), ranks, each),)


def representative_schedule(options: Options, placement: Sequence[int]) -> str:
    """The named schedule by which a cut is judged while the order is not searched yet."""
    if options.schedule != "search":
        return options.schedule
    shapes = shapes_of(placement)
    return "1f1b" if "linear" in shapes else "zb-v" if "v" in shapes else "interleaved-1f1b"


def in_flight_counts(options: Options, placement: Sequence[int]) -> tuple[int, ...]:
    """Per stage how many microbatches it holds between forward and backward."""
    return peak_in_flight(
        representative_schedule(options, placement), placement, options.microbatches
    )


@lru_cache(maxsize=8)
def snapshots_of(
    name: str, placement: tuple[int, ...], microbatches: int, again: bool, except_last: bool = False
) -> tuple[tuple[Moment, ...], ...]:
    """Per rank the moments of a named schedule at which it may hold most; `again` if its stages recompute.

    `but_last` if the step's last microbatch is not computed again.
    """
    return tuple(
        map(moments, generate(name, placement, microbatches, again, except_last=except_last).rows)
    )


def named_schedule(name: str, problem: PlacedProblem) -> Schedule:
    """The compute actions of a named schedule, each recompute as early as its memory allows."""
    if name in SPLIT and not problem.can_split:
        raise InputError(
            f"schedule {name!r} splits backwards in two, but the costs do not say how long each half takes; choose "
            f"other costs, or one of {', '.join(n for n in fitting_names(problem.placement, 1) if n not in SPLIT)}"
        )
    return add_recomputes(problem, generate(name, problem.placement, problem.microbatches))


def schedule_plan(
    options: Options,
    stages: Sequence[Stage],
    links: Links,
    placement: Sequence[int],
    allocator: AllocatorName,
) -> tuple[Schedule, Ordering | None]:
    """The schedule of a plan with its transfers, and how it was found if it was searched for.

    Its ranks are within `options.memory_bytes` by the memory model. AssertionError if it were not sound;
    InfeasibleError if none is found.
    """
    problem = problem_of_stages(stages, links, placement, options.microbatches)
    given = options.caps(max(placement) + 1)

    def excess(schedule: Schedule) -> tuple[int, ...]:
        return excess_of(stages, schedule, given, allocator)

    room = activation_caps(stages, placement, options.microbatches, given, allocator)
    safe, ordering = replace(problem, caps=room), None
    if options.schedule == "search":
        caps = activation_caps(
            stages, placement, options.microbatches, given, allocator, highest=True
        )
        compute, ordering = _searched(replace(problem, caps=caps), safe, excess)
    else:
        compute = named_schedule_within(options.schedule, safe, excess)
    lowered = add_transfers(problem, compute)
    found = check_schedule(lowered, problem)
    assert not found, f"the schedule is not sound: {found}"
    return lowered, ordering


def named_schedule_within(name: str, problem: PlacedProblem, excess: Excess) -> Schedule:
    """The named order, recomputes as early as memory allows; InfeasibleError if it does not fit with late ones."""
    except_last = [costs.except_last for costs in problem.costs]
    late = generate(
        name, problem.placement, problem.microbatches, problem.recompute, except_last=except_last
    )
    for schedule in (named_schedule(name, problem), late):
        if not any(excess(schedule)):
            return schedule
    raise InfeasibleError(
        f"no cut was found whose ranks fit their memory under {name!r}; whether there is one is not proven"
    )


def _searched(
    problem: PlacedProblem, safe: PlacedProblem, excess: Excess
) -> tuple[Schedule, Ordering]:
    """The best order found if what it gains over the best named one survives noise, else that one.

    The caps of `problem` are what no order that fits is over, those of `safe` leave room for any order.
    """
    # Imported here: it may need CP-SAT, which takes a while to load.
    from pipecompile.schedule.search import best_named, order_lower_bound

    known = _named_within(problem, excess)
    named = best_named(known)
    found = min(_found(problem, safe, excess), key=lambda order: order.value_ns, default=None)
    if found is None and named is None:
        raise InfeasibleError(
            "no order was found whose ranks fit their memory; whether there is one is not proven"
        )
    kept = found is not None and (
        named is None
        or (
            found.value_ns < named.value_ns
            and is_gain_robust(problem, found.schedule, named.schedule)
        )
    )
    chosen = found if kept or named is None else named
    assert chosen is not None
    ordering = Ordering(
        searched_ns=min(order.value_ns for order in (found, named) if order is not None),
        bound_ns=order_lower_bound(problem, "makespan"),
        named_ns=_fitting(known),
        kept=kept,
    )
    return chosen.schedule, ordering


def _found(problem: PlacedProblem, safe: PlacedProblem, excess: Excess) -> Iterator[SearchResult]:
    """Orders that fit. One that is found within the caps may still need too much: then they are lowered by as much."""
    from pipecompile.schedule.search import search

    within = problem
    for _ in range(SEARCHES):
        try:
            found = search(within, seconds=SEARCH_SECONDS)
        except InfeasibleError:
            break
        over = excess(found.schedule)
        if not any(over):
            yield found
            break
        rows = zip(within.caps or (), found.schedule.compute, over, strict=True)
        caps = (
            max(0, max(within.held_bytes(row)) - more) if more else cap for cap, row, more in rows
        )
        within = replace(within, caps=tuple(caps))
    if within != problem:
        with suppress(InfeasibleError):
            found = search(safe, seconds=SEARCH_SECONDS)
            if not any(
                excess(found.schedule)
            ):  # recomputes may have been moved to where less is free
                yield found


def _named_within(problem: PlacedProblem, excess: Excess) -> tuple[NamedResult, ...]:
    """The named orders of this placement; those fit whose ranks are within their memory."""
    from pipecompile.schedule.search import simulate_named

    orders = simulate_named(problem, "makespan")
    return tuple(replace(order, fits=not any(excess(order.schedule))) for order in orders)


def compared(problem: PlacedProblem, excess: Excess) -> tuple[dict[str, int], int]:
    """The steps in ns of the named orders that fit, and the bound on all orders: what a searched plan says of them."""
    from pipecompile.schedule.search import order_lower_bound

    return _fitting(_named_within(problem, excess)), order_lower_bound(problem, "makespan")


def _fitting(named: Iterable[NamedResult]) -> dict[str, int]:
    return {order.schedule.name: order.value_ns for order in named if order.fits}
