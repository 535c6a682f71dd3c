"""Where the stages of a plan lie, and which rank does what, when. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pipecompile.errors import InputError
from pipecompile.ir.allocator import AllocatorName
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options, Ordering, Stage
from pipecompile.ir.schedule import Schedule
from pipecompile.schedule.check import check
from pipecompile.schedule.lower import lower
from pipecompile.schedule.named import ASYNCHRONOUS, NAMES, SPLIT, fitting, generate, in_flight, shape_needed
from pipecompile.schedule.placement import SHAPES, place, shapes_of
from pipecompile.schedule.problem import Problem
from pipecompile.schedule.recompute import with_recompute
from pipecompile.schedule.robust import gain_survives
from pipecompile.schedule.stages import activation_caps, problem_of_stages

if TYPE_CHECKING:
    from pipecompile.schedule.search import Named

__all__ = ["compared", "flights", "named_schedule", "ordered", "placements", "stand_in"]

SEARCH_SECONDS = 3.0  # of work


def placements(options: Options) -> tuple[tuple[int, ...], ...]:
    """Where the stages may lie: one way, or several where a search may choose; InputError if the options disagree."""
    known = [name for name in NAMES if name not in ASYNCHRONOUS]
    if options.schedule not in (*NAMES, "search"):
        raise InputError(f"schedule {options.schedule!r} is not known; choose one of {', '.join(known)}, search")
    if options.schedule in ASYNCHRONOUS:
        raise InputError(
            f"schedule {options.schedule!r} updates weights while microbatches are on their way, which no step does "
            "yet; choose a synchronous one such as '1f1b', or look at it with `pipecompile schedule`"
        )
    searched = options.schedule == "search"
    shape, fixed = ("any", None) if searched else shape_needed(options.schedule)
    each = options.stages_per_rank or fixed or (2 if shape == "loop" else 1)
    if options.k % each:
        raise InputError(f"k={options.k} stages cannot be placed {each} on a rank; choose k as a multiple of {each}")
    ranks = options.k // each
    if searched and options.placement is None:
        return tuple(dict.fromkeys(place(shape, ranks, each) for shape in SHAPES))
    return (place(options.placement or ("linear" if shape == "any" else shape), ranks, each),)


def stand_in(options: Options, placement: Sequence[int]) -> str:
    """The named schedule by which a cut is judged while the order is not searched yet."""
    if options.schedule != "search":
        return options.schedule
    shapes = shapes_of(placement)
    return "1f1b" if "linear" in shapes else "zb-v" if "v" in shapes else "interleaved-1f1b"


def flights(options: Options, placement: Sequence[int]) -> tuple[int, ...]:
    """Per stage how many microbatches it holds between forward and backward."""
    return in_flight(stand_in(options, placement), placement, options.microbatches)


def named_schedule(name: str, problem: Problem) -> Schedule:
    """The compute actions of a named schedule, each recompute as early as its memory allows."""
    if name in SPLIT and not problem.splits:
        raise InputError(
            f"schedule {name!r} splits backwards in two, but the costs do not say how long each half takes; choose "
            f"other costs, or one of {', '.join(n for n in fitting(problem.placement, 1) if n not in SPLIT)}"
        )
    return with_recompute(problem, generate(name, problem.placement, problem.microbatches))


def ordered(
    options: Options, stages: Sequence[Stage], links: Links, placement: Sequence[int], allocator: AllocatorName
) -> tuple[Schedule, Ordering | None]:
    """The schedule of a plan with its transfers, and how it was found if it was searched for.

    AssertionError if it were not sound; InfeasibleError if a search finds no room for one microbatch.
    """
    caps = activation_caps(stages, placement, options.microbatches, options.memory_bytes, allocator)
    problem = problem_of_stages(stages, links, placement, options.microbatches, caps)
    if options.schedule == "search":
        compute, ordering = _searched(problem)
    else:
        compute, ordering = named_schedule(options.schedule, problem), None
    lowered = lower(problem, compute)
    found = check(lowered, problem_of_stages(stages, links, placement, options.microbatches))
    assert not found, f"the schedule is not sound: {found}"
    return lowered, ordering


def _searched(problem: Problem) -> tuple[Schedule, Ordering]:
    """The best order found if what it gains over the best named one survives noise, else that one."""
    # Imported here: it may need CP-SAT, which takes a while to load.
    from pipecompile.schedule.search import best_named, search

    found = search(problem, seconds=SEARCH_SECONDS)
    named = best_named(found.named)
    kept = named is None or gain_survives(problem, found.schedule, named.schedule)
    compute = found.schedule if kept or named is None else named.schedule
    ordering = Ordering(
        searched_ns=found.value,
        bound_ns=found.bound,
        named_ns=_fitting(found.named),
        kept=kept,
    )
    return compute, ordering


def compared(problem: Problem) -> tuple[dict[str, int], int]:
    """The steps in ns of the named orders that fit, and the bound on all orders: what a searched plan says of them."""
    from pipecompile.schedule.search import bound_of, named_orders

    return _fitting(named_orders(problem, "makespan")), bound_of(problem, "makespan")


def _fitting(named: Iterable[Named]) -> dict[str, int]:
    return {order.schedule.name: order.value for order in named if order.fits}
