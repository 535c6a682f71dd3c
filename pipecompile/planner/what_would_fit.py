"""What to suggest where no cut fits: options near those that were asked for, under which one does.

Needs no PyTorch.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, islice

import msgspec

from pipecompile.errors import PipecompileError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options
from pipecompile.memory_model.empty_ranks import room_of_ranks
from pipecompile.partition.missing_memory import missing_bytes
from pipecompile.partition.roomiest_cut import roomiest_cut
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.violations import violations
from pipecompile.planner.partition_problem import problem_of
from pipecompile.planner.setting_bounds import state_bytes
from pipecompile.schedule.selection import placements

__all__ = ["has_fitting_cut", "what_would_fit"]

SUGGESTIONS = 2
CUTS_PRICED = 3  # for something to suggest


def what_would_fit(graph: CostGraph, options: Options, links: Links) -> str:
    """Return the nearest options that can be met, as advice.

    It is "" where memory is not capped. Tried are `recompute=auto`, more stages, and both. Lower
    bounds of what ranks hold rule most of them out. Others would fit if their cut with the most
    room does. If none does, what the bounds leave open may fit.
    """
    if options.memory_bytes is None:
        return ""
    # A list of caps, of ranks or a matrix of links is for a fixed number of ranks.
    is_fixed = links.ranks is not None or isinstance(options.memory_bytes, tuple)
    is_fixed = is_fixed or options.stage_replicas is not None
    most = options.k if is_fixed else 2 * options.k + 2
    single, double = _with_more_room(options, most)
    possible = (text for text, changed in single.items() if _may_fit(graph, changed, links))
    priced, fitting = list[str](), list[str]()
    for text in islice(possible, CUTS_PRICED):
        priced.append(text)
        if has_fitting_cut(graph, single[text], links):
            fitting.append(text)
        if len(fitting) == SUGGESTIONS:
            break
    if fitting:
        return f"this would fit: {' or '.join(fitting)}"
    both = (text for text, changed in double.items() if _may_fit(graph, changed, links))
    # That one cut does not fit rules nothing out.
    open_ones = list(islice(chain(priced, possible, both), SUGGESTIONS))
    if open_ones:
        return f"this may fit: {' or '.join(open_ones)}"
    return (
        f"neither up to {most} stages nor recompute would fit: allow more memory or more, "
        f"smaller microbatches"
    )


def _with_more_room(options: Options, most: int) -> tuple[dict[str, Options], dict[str, Options]]:
    """Return changes by which stages hold less: of one thing, and of two, up to `most` stages."""
    counts = range(options.k + 1, most + 1)
    more = {f"k={k}": msgspec.structs.replace(options, k=k) for k in counts}
    if options.recompute == "auto":
        return more, {}
    recompute = {"recompute=auto": msgspec.structs.replace(options, recompute="auto")}
    both = {
        f"{text} with recompute=auto": msgspec.structs.replace(changed, recompute="auto")
        for text, changed in more.items()
    }
    return recompute | more, both


def _may_fit(graph: CostGraph, options: Options, links: Links) -> bool:
    """Return whether lower bounds of what ranks hold leave a cut possible."""
    with suppress(PipecompileError):
        placement = placements(options)[0]
        caps = options.caps(max(placement) + 1)
        # Sums alone rule out most numbers of stages, before there is a problem of them.
        room = caps and room_of_ranks(caps, placement, graph.allocator)
        if room is not None and state_bytes(graph, options) > sum(room):
            return False
        return missing_bytes(problem_of(graph, options, links)) == 0
    return False


def has_fitting_cut(graph: CostGraph, options: Options, links: Links) -> bool:
    """Return whether the cut with the most room fits.

    It goes by lower bounds of what stages hold, and only it is priced: a search takes as long as
    a plan.
    """
    with suppress(PipecompileError):
        problem = problem_of(graph, options, links)
        # It raises InfeasibleError where there are too few units, or pins that no cut meets.
        found = roomiest_cut(UnitGraph.of(problem))
        if found is not None and found.missing <= 0:
            return next(violations(problem, found.assignment), None) is None
    return False
