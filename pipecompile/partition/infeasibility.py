"""Why a problem has no cut: which constraint cannot be met, where, and by how much.

The constraints are dropped one after the other until a cut of the graph's own order exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from pipecompile.ir.size import exact_size_text, size_text
from pipecompile.partition.coarsening import coarse_groups
from pipecompile.partition.memory_constraint import MemoryConstraint, Price, StageCandidate
from pipecompile.partition.missing_memory import missing_bytes
from pipecompile.partition.priced_search import PricedSearch
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.roomiest_cut import (
    LARGEST_BYTES,
    PRECISION_PARTS,
    first_cut,
    roomiest_cut,
    stages_of,
)
from pipecompile.partition.unit_graph import UnitGraph

__all__ = ["proven_shortage", "why_infeasible"]

UNITS_MAX = 1000  # above it, memory that is missing is looked for between blocks
LARGEST_UNITS = 3  # that a message names
ROUNDS = 3  # of cuts with bounds that are raised
NODES_PRICED = 1000  # in stages, for each guess of how much memory is missing
PRICES_MIN = 4  # of each stage, below which a search finds nothing


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
        if first_cut(coarse, replace(coarse.problem, memory=None)) is not None:
            if problem.ranks != problem.k:
                return _shared_memory_reason(unit_graph, memory)
            return _memory_reason(coarse, memory)
    plain = replace(problem, memory=None, parameters_everywhere=False)
    if problem.parameters_everywhere and first_cut(unit_graph, plain) is not None:
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
    """Return by how much all ranks would need more, and the stage that is then tightest."""
    problem = unit_graph.problem
    worst = _roomiest(unit_graph, memory)
    if worst is None:
        return (
            f"no cut into k={problem.k} stages can be made to fit, whatever memory the ranks have"
        )
    stage, missing, _ = _narrowed(unit_graph, memory, worst)
    units = (unit for unit in unit_graph.units if unit[0] in stage.nodes)
    largest = max(units, key=lambda unit: memory.held_bytes(unit, stage.stage))
    alone = memory.held_bytes(largest, stage.stage)
    return (
        f"a rank may hold {size_text(stage.cap)}, but the best cut into k={problem.k} stages "
        f"that was found needs {exact_size_text(stage.cap + missing)}, {size_text(missing)} "
        f"more, in stage {stage.stage}, where {largest[0]} is the largest node "
        f"({size_text(alone)} alone)"
    )


def _roomiest(unit_graph: UnitGraph, memory: MemoryConstraint) -> _Shortage | None:
    """Return the worst shortage of the cut with the most room, by bounds that are raised where
    prices say more.
    """
    problem, caps = unit_graph.problem, memory.caps
    best: _Shortage | None = None
    for _ in range(ROUNDS):
        lowered = replace(problem, memory=replace(memory, caps=caps))
        found = roomiest_cut(UnitGraph(lowered, unit_graph.units))
        if found is None:
            break
        shortages = list(_shortages(problem, memory, found.stages))
        worst = max(shortages, key=_missing)
        best = worst if best is None else min(best, worst, key=_missing)
        if worst is not best or worst.excess <= 0:
            break
        # A stage that takes 5 bytes more than its bound says gets a cap that is 5 bytes
        # lower in the next round, so that a cut by bounds alone leaves these 5 free.
        caps = tuple(cap - each.excess for cap, each in zip(caps, shortages, strict=True))
    return best


def _narrowed(unit_graph: UnitGraph, memory: MemoryConstraint, worst: _Shortage) -> _Shortage:
    """Return a smaller worst shortage, of cuts whose stages are priced in a search.

    It is found by bisection, for graphs that are small enough for so many prices.
    """
    problem = unit_graph.problem
    prices = NODES_PRICED * problem.k // len(problem.graph.nodes)
    if memory.price is None or prices < PRICES_MIN * problem.k:
        return worst
    too_few = missing_bytes(problem) - 1
    while worst.missing - too_few > max(1, worst.missing // PRECISION_PARTS):
        middle = (too_few + worst.missing) // 2
        caps = tuple(cap + middle for cap in memory.caps)
        larger = replace(problem, memory=replace(memory, caps=caps))
        found = first_cut(unit_graph, larger, PricedSearch(larger, prices).best)
        if found is None:
            too_few = middle
            continue
        worst = max(_shortages(problem, memory, stages_of(unit_graph, found)), key=_missing)
        # A price that is found to 1 % may be above the cap that it fits.
        worst = worst._replace(missing=min(worst.missing, middle))
    return worst


class _Shortage(NamedTuple):
    """By how many bytes a stage is over its cap, and by how many of them bounds are too low."""

    stage: StageCandidate
    missing: int
    excess: int


_missing = attrgetter("missing")


def _shortages(
    problem: PartitionProblem, memory: MemoryConstraint, stages: Sequence[tuple[str, ...]]
) -> Iterator[_Shortage]:
    """Yield the shortage of each stage of a cut."""
    bounds = memory.unpriced
    for stage, names in enumerate(stages):
        candidate = StageCandidate(
            stage=stage,
            before=tuple(chain.from_iterable(stages[:stage])),
            nodes=names,
            in_flight=memory.in_flight[stage],
            cap=memory.caps[problem.stage_ranks[stage]],
        )
        least = bounds.held_bytes(names, stage) - candidate.cap
        missing = least
        if memory.price is not None:
            missing = max(least, _priced_missing(candidate, memory.price, max(0, least)))
        yield _Shortage(candidate, missing, missing - least)


def _priced_missing(
    stage: StageCandidate, price: Callable[[StageCandidate], Price], least: int
) -> int:
    """Return by how much the cap of a stage must grow for a price; 0 if it has one, or if no cap
    would do.

    It is at least `least` bytes, and found to 1 % where a price does not say it.
    """

    def priced(more: int) -> Price:
        return price(replace(stage, cap=stage.cap + more))

    first = priced(0)
    if first.ns is not None or first.missing is not None:
        return first.missing or 0
    # Prices take long: a step of 1 % that doubles meets an answer
    # near the bound soon, and any other one after a few more.
    too_few, enough, step = 0, least, max(1, (stage.cap + least) // PRECISION_PARTS)
    while priced(enough).ns is None:
        too_few, enough, step = enough, enough + step, 2 * step
        if enough > LARGEST_BYTES:
            return 0
    while enough - too_few > max(1, (stage.cap + enough) // PRECISION_PARTS):
        middle = (too_few + enough) // 2
        too_few, enough = (middle, enough) if priced(middle).ns is None else (too_few, middle)
    return enough


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
    has_cut = first_cut(between_blocks, replace(coarse, memory=None)) is not None
    return between_blocks if has_cut else unit_graph
