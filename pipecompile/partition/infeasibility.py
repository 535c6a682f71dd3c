"""Why a problem has no cut: which constraint cannot be met, where, and by how much.

The constraints are dropped one after the other until a cut of the graph's own order exists.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pipecompile.ir.links import FREE
from pipecompile.ir.size import exact_size_text, size_text
from pipecompile.partition.chains import Chain
from pipecompile.partition.coarsening import coarse_groups
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.missing_memory import missing_bytes
from pipecompile.partition.orders import topological_orders
from pipecompile.partition.prefix_cuts import cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.windows import Limit

__all__ = ["proven_shortage", "why_infeasible"]

NODES_PRICED = 20_000  # in stages, for each guess of how much memory is missing
PRICES_MAX = 300
PAIRS_MAX = 20_000_000
UNITS_MAX = 1000  # above it, memory that is missing is looked for between blocks
LARGEST_BYTES = 1 << 60  # more than any rank has
LARGEST_UNITS = 3  # that a message names
PRECISION_PARTS = 100  # missing memory is found to this part


def why_infeasible(unit_graph: UnitGraph, *, proven: bool) -> str:
    """Return one line for an InfeasibleError; `proven` if a search has excluded all cuts."""
    problem = unit_graph.problem
    # Of stages alone on their ranks more is known: what the best cut needs, and where.
    shortage = proven_shortage(unit_graph) if problem.ranks != problem.k else None
    if shortage is not None:
        return shortage
    return _reason(unit_graph) + ("" if proven else "; that there is no other cut is not proven")


def _reason(unit_graph: UnitGraph) -> str:
    """Return the constraint without which there is a cut, in words, and what to change."""
    problem = unit_graph.problem
    # A constraint is to blame if there is a cut without it and without those before it.
    memory = problem.memory
    if memory is not None:
        coarse = _coarser(unit_graph)
        if _first_cut(coarse, replace(coarse.problem, memory=None)) is not None:
            if problem.ranks != problem.k:
                return _shared_memory_reason(unit_graph, memory)
            return _memory_reason(coarse, memory)
    plain = replace(problem, memory=None, parameters_everywhere=False)
    if problem.parameters_everywhere and _first_cut(unit_graph, plain) is not None:
        with_parameters = int((unit_graph.parameters > 0).sum())
        return (
            f"k={problem.k} stages must each have parameters, but no cut has that: only "
            f"{with_parameters} of {unit_graph.count} units have any; choose a smaller k, or allow "
            f"stages without parameters"
        )
    pins = ", ".join(f"{name}={stage}" for name, stage in problem.pin.items())
    return (
        f"no cut into k={problem.k} non-empty stages meets the pins {pins}; drop one or choose "
        f"another k"
    )


def proven_shortage(unit_graph: UnitGraph) -> str | None:
    """Return why no cut fits the caps, if that follows from what each node holds at least.

    A node holds the least in some stage where it may lie. Those that can only lie on one rank must
    fit there, and all of them must fit on all ranks together.
    """
    problem, memory = unit_graph.problem, unit_graph.problem.memory
    if memory is None:
        return None
    low, high = _stage_windows(unit_graph)
    stages = [range(first, last + 1) for first, last in zip(low, high, strict=True)]
    units = unit_graph.units
    least = [
        min(memory.held_bytes(unit, stage) for stage in allowed)
        for unit, allowed in zip(units, stages, strict=True)
    ]
    for rank, cap in enumerate(memory.caps):
        forced = [
            unit
            for unit, allowed in enumerate(stages)
            if all(problem.stage_ranks[stage] == rank for stage in allowed)
        ]
        needed = sum(least[unit] for unit in forced)
        if needed > cap:
            largest = sorted(forced, key=least.__getitem__, reverse=True)[:LARGEST_UNITS]
            names = ", ".join(f"{units[unit][0]} ({size_text(least[unit])})" for unit in largest)
            return (
                f"no cut fits: rank {rank} may hold {size_text(cap)}, but the nodes that can only "
                f"lie there hold at least {size_text(needed)}, the largest of them {names}; allow "
                f"more memory or smaller microbatches"
            )
    if sum(least) > sum(memory.caps):
        return (
            f"no cut fits: the {problem.ranks} ranks may hold {size_text(sum(memory.caps))} "
            f"together, but all nodes hold at least {size_text(sum(least))}; allow more memory or "
            f"more ranks"
        )
    return None


def _stage_windows(unit_graph: UnitGraph) -> tuple[list[int], list[int]]:
    """Return per unit the first and the last stage where it may lie.

    Pins say so; and as no stage is empty, the only unit that needs no other one lies in the first
    stage, and the only one that no other needs in the last.
    """
    low, high = (list(window) for window in unit_graph.pin_windows)
    for edges, stage in ((unit_graph.before, 0), (unit_graph.after, unit_graph.k - 1)):
        ends = [unit for unit in range(unit_graph.count) if not edges[unit]]
        if len(ends) == 1:
            low[ends[0]] = high[ends[0]] = stage
    return low, high


def _first_cut(unit_graph: UnitGraph, problem: PartitionProblem) -> Chain | None:
    """Return a cut of one order by `problem`; None without one.

    Stages that share ranks are taken as alone on theirs.
    """
    if problem.ranks != problem.k:
        problem = replace(problem, placement=None, speeds=None, links=FREE, memory=None)
    # The same units, so that rows of its prefixes are places in the same order.
    plain = UnitGraph(problem, unit_graph.units)
    prefixes = Prefixes(plain, next(iter(topological_orders(plain))))
    prices = 4 * problem.k + NODES_PRICED * problem.k // len(problem.graph.nodes)
    priced_search = PricedSearch(problem, min(PRICES_MAX, prices), pairs_limit=PAIRS_MAX)
    return cut_order(prefixes, Limit(), priced_search.best)


def _shared_memory_reason(unit_graph: UnitGraph, memory: MemoryConstraint) -> str:
    """Return the reason where stages share ranks.

    It compares all nodes at their least with all ranks.
    """
    problem = unit_graph.problem
    in_flight = min(memory.in_flight)
    needed = int((unit_graph.resident + in_flight * unit_graph.saved).sum())
    return (
        f"the {problem.ranks} ranks may hold {size_text(sum(memory.caps))} together and all nodes "
        f"need at least {size_text(needed)}, but no cut into k={problem.k} stages was found that "
        f"shares them out within each rank's cap"
    )


def _memory_reason(unit_graph: UnitGraph, memory: MemoryConstraint) -> str:
    """Return by how much all ranks would need more, and the stage that is then tightest.

    The amount is found by bisection, from what is missing by lower bounds on.
    """
    problem = unit_graph.problem

    def cut_with(more: int) -> Chain | None:
        caps = tuple(cap + more for cap in memory.caps)
        return _first_cut(unit_graph, replace(problem, memory=replace(memory, caps=caps)))

    too_few = max(0, missing_bytes(problem) - 1)
    step = max(1, (max(memory.caps) + too_few) // PRECISION_PARTS)
    enough = too_few + step
    while (chain := cut_with(enough)) is None:
        too_few, step = enough, 4 * step
        enough = too_few + step
        if enough > LARGEST_BYTES:
            return (
                f"no cut into k={problem.k} stages can be made to fit, whatever memory the ranks "
                f"have"
            )
    while enough - too_few > max(1, enough // PRECISION_PARTS):
        middle = (too_few + enough) // 2
        smaller = cut_with(middle)
        if smaller is None:
            too_few = middle
        else:
            enough, chain = middle, smaller
    tightest = _tightest_stage(unit_graph, memory, chain)
    cap = memory.caps[problem.stage_ranks[tightest.stage]]
    largest = unit_graph.units[tightest.largest_unit]
    alone = memory.held_bytes(largest, tightest.stage)
    return (
        f"a rank may hold {size_text(cap)}, but the best cut into k={problem.k} stages that was "
        f"found needs {exact_size_text(cap + enough)}, {size_text(enough)} more, in stage "
        f"{tightest.stage}, where {largest[0]} is the largest node ({size_text(alone)} alone)"
    )


def _coarser(unit_graph: UnitGraph) -> UnitGraph:
    """Return the graph between blocks if it has too many units for a bisection, else the graph.

    The graph itself is also returned if there is no cut between blocks.
    """
    problem = unit_graph.problem
    together = (*problem.together, *coarse_groups(problem.graph, "blocks"))
    coarse = replace(problem, granularity="operators", together=together)
    if unit_graph.count <= UNITS_MAX:
        return unit_graph
    between_blocks = UnitGraph(coarse, coarse.units)
    has_cut = _first_cut(between_blocks, replace(coarse, memory=None)) is not None
    return between_blocks if has_cut else unit_graph


class _TightestStage(NamedTuple):
    """The stage with the least room left, and the unit of it that holds most."""

    stage: int
    largest_unit: int


def _tightest_stage(
    unit_graph: UnitGraph, memory: MemoryConstraint, chain: Chain
) -> _TightestStage:
    """Return the tightest stage of a cut of the graph's own order."""
    order = next(iter(topological_orders(unit_graph)))

    def held(unit: int, stage: int) -> int:
        return memory.held_bytes(unit_graph.units[unit], stage)

    rooms = []
    for stage, (start, stop) in enumerate(pairwise(chain.rows)):
        cap = memory.caps[unit_graph.problem.stage_ranks[stage]]
        total = sum(held(unit, stage) for unit in order[start:stop])
        rooms.append((cap - total, stage, start, stop))
    _, stage, start, stop = min(rooms)
    return _TightestStage(stage, max(order[start:stop], key=lambda unit: held(unit, stage)))
