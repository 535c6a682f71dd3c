"""Cuts that differ from a given one by what lies beside one boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipecompile.errors import PipecompileError
from pipecompile.partition.objective import rank_loads, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve
from pipecompile.partition.units import Unit
from pipecompile.partition.violations import violations

__all__ = [
    "BorderUnit",
    "EdgePart",
    "MovedLoads",
    "border_units",
    "edge_parts",
    "loads_after",
    "next_best_pin",
]


class EdgePart(NamedTuple):
    """Units at an end of a stage, and the stage beyond that end."""

    units: tuple[Unit, ...]
    before: int
    after: int


def edge_parts(
    problem: PartitionProblem, assignment: Mapping[str, int], stage: int
) -> Iterator[EdgePart]:
    """Yield the first and the last units of `stage` that take any time, as few as it needs.

    Units that take no time, such as views, go with them. A stage keeps a unit at least.
    """
    # In a topological order the first units of a stage need nothing from it, and nothing in it
    # needs the last ones: each may lie beyond.
    members = [unit for unit in problem.units if assignment[unit[0]] == stage]
    for units, after in ((members, stage - 1), (members[::-1], stage + 1)):
        part = _with_time(problem, units[:-1])
        if part and 0 <= after < problem.k:
            yield EdgePart(part, stage, after)


def _with_time(problem: PartitionProblem, units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return the units up to the first one that takes any time; () if none does."""
    for count, unit in enumerate(units, start=1):
        if problem.compute_ns(unit, last=True):
            return tuple(units[:count])
    return ()


@dataclass(frozen=True)
class MovedLoads:
    """The loads of ranks with their transfers after a move, and the first constraint that it
    violates; "" if it is allowed.
    """

    loads_ns: tuple[int, ...]
    obstacle: str


def loads_after(
    problem: PartitionProblem, assignment: Mapping[str, int], part: EdgePart
) -> MovedLoads:
    """Return what ranks would take if the units of `part` lay in the stage beyond."""
    names = (name for unit in part.units for name in unit)
    moved = {**assignment, **dict.fromkeys(names, part.after)}
    return MovedLoads(
        rank_loads(problem, stage_loads(problem, moved)), next(violations(problem, moved), "")
    )


# The next-best cut. A cut that is not the given one has another set of units before some boundary:
#
#     given         a b c │ d e f │ g h           c, the last before the first boundary, lies behind
#     another one   a b   │ c d   │ e f g h       it: a cut differs by as much at least
#
# If units are missing before some boundaries, take the last of these, between stages s and s + 1.
# With a unit all that needs it is missing, so that one is missing that nothing before the boundary
# needs. It lies in s + 1 and no later, since nothing is missing before the next boundary. Where
# units are added before some boundaries, the first of these has one that needs nothing behind the
# boundary; it now lies in s. So the best of all other cuts is found by trying every such unit.


class BorderUnit(NamedTuple):
    """A unit beside a boundary, and the stage on the other side."""

    unit: Unit
    stage: int


def border_units(
    problem: PartitionProblem, assignment: Mapping[str, int]
) -> Iterator[BorderUnit]:
    """Yield what tells other cuts apart: each cut but the given one has one of these units in the
    stage that is named with it.
    """
    edges = list(_edges(problem))
    stages = [assignment[unit[0]] for unit in problem.units]
    for boundary in range(problem.k - 1):
        needed = {a for a, b in edges if stages[b] <= boundary}
        needing = {b for a, b in edges if stages[a] > boundary}
        for index, unit in enumerate(problem.units):
            if stages[index] <= boundary and index not in needed:
                yield BorderUnit(unit, boundary + 1)
            elif stages[index] > boundary and index not in needing:
                yield BorderUnit(unit, boundary)


def _edges(problem: PartitionProblem) -> Iterator[tuple[int, int]]:
    """Yield pairs of units of which the first lies in no later stage than the second."""
    place = {name: index for index, unit in enumerate(problem.units) for name in unit}
    pairs = [(t.producer, name) for t in problem.graph.tensors for name in t.consumers]
    for first, then in (*pairs, *problem.precedence):
        if place[first] != place[then]:
            yield place[first], place[then]


def next_best_pin(
    problem: PartitionProblem,
    assignment: Mapping[str, int],
    *,
    seconds: float,
    may_go_on: Callable[[], bool],
) -> tuple[str, int] | None:
    """Return the node and the stage that, as a pin, give the best cut but the given one; None if
    there is no other cut.

    Each unit at a boundary is pinned beyond it in turn, and the cut searched again by about
    `seconds` of work. Ties are decided by order. The search ends early unless it `may_go_on`.
    """
    best: tuple[int, str, int] | None = None
    for unit, stage in border_units(problem, assignment):
        if not may_go_on():
            break
        pinned = replace(problem, pin={**problem.pin, unit[0]: stage})
        try:
            value = solve(pinned, seconds=seconds, explained=False).search.value
        except PipecompileError:
            continue  # it lies where a pin or a group has it
        if best is None or value < best[0]:
            best = (value, unit[0], stage)
    return None if best is None else best[1:]
