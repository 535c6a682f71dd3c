"""Cuts that differ from a given one by what lies beside one boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "moved",
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
    after = moved(assignment, part)
    return MovedLoads(
        rank_loads(problem, stage_loads(problem, after)), next(violations(problem, after), "")
    )


def moved(assignment: Mapping[str, int], part: EdgePart) -> dict[str, int]:
    """Return the cut in which the units of `part` lie in the stage beyond."""
    names = (name for unit in part.units for name in unit)
    return {**assignment, **dict.fromkeys(names, part.after)}


# The next-best cut. Nodes that take no time, such as views, make no difference. A cut is another
# one if a unit that takes time lies in another stage, and so on the other side of a boundary:
#
#     given         a b c │ d e f │ g h           c, the last one before the first boundary, lies
#     another one   a b   │ c d   │ e f g h       behind it: another cut differs by as much at least
#
# If units are missing before some boundaries, take the last of these, between stages s and s + 1.
# With a unit all that needs it is missing, so that one is missing that nothing before the boundary
# needs, of what takes time. It lies in s + 1, as nothing is missing before the next boundary. Where
# units are added before some boundaries, the first of these has one that needs nothing behind the
# boundary, of what takes time; it now lies in s. So the best of all other cuts is found by trying
# every such unit.


class BorderUnit(NamedTuple):
    """A unit beside a boundary, and the stage on the other side."""

    unit: Unit
    stage: int


def border_units(problem: PartitionProblem, assignment: Mapping[str, int]) -> Iterator[BorderUnit]:
    """Yield what tells other cuts apart: each cut but the given one has one of these units in the
    stage that is named with it. Units that are pinned elsewhere are left out.
    """
    units, (before, behind) = problem.units, _neighbours(problem)
    takes_time = [problem.compute_ns(unit, last=True) > 0 for unit in units]
    stages = [assignment[unit[0]] for unit in units]
    for boundary in range(problem.k - 1):
        inside = [stage <= boundary for stage in stages]
        outside = [not each for each in inside]
        # Units are in a topological order: what a unit leads to comes later.
        followed = _reaching(reversed(range(len(units))), behind, inside, takes_time)
        preceded = _reaching(range(len(units)), before, outside, takes_time)
        for index, unit in enumerate(units):
            is_border = takes_time[index] and not (followed if inside[index] else preceded)[index]
            stage = boundary + inside[index]
            if is_border and problem.pins.get(unit, stage) == stage:
                yield BorderUnit(unit, stage)


def _neighbours(problem: PartitionProblem) -> tuple[list[set[int]], list[set[int]]]:
    """Return, for each unit, those that lie in no later stage, and those in no earlier one."""
    place = {name: index for index, unit in enumerate(problem.units) for name in unit}
    before: list[set[int]] = [set() for _ in problem.units]
    behind: list[set[int]] = [set() for _ in problem.units]
    pairs = [(t.producer, name) for t in problem.graph.tensors for name in t.consumers]
    for first, then in (*pairs, *problem.precedence):
        if place[first] != place[then]:
            before[place[then]].add(place[first])
            behind[place[first]].add(place[then])
    return before, behind


def _reaching(
    order: Iterable[int],
    neighbours: Sequence[set[int]],
    within: Sequence[bool],
    takes_time: Sequence[bool],
) -> list[bool]:
    """Return whether each unit leads to another one that takes time, all of them `within`.

    In `order` the neighbours of a unit come before it.
    """
    reaches = [False] * len(neighbours)
    for index in order:
        reaches[index] = any(
            within[other] and (takes_time[other] or reaches[other]) for other in neighbours[index]
        )
    return reaches


def next_best_pin(
    problem: PartitionProblem,
    assignment: Mapping[str, int],
    *,
    seconds: float,
    may_go_on: Callable[[], bool],
) -> tuple[str, int] | None:
    """Return the node and the stage that, as a pin, give the best cut in which a node that takes
    time lies in another stage; None if no such cut is found.

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
            continue  # no other cut has it there
        if best is None or value < best[0]:
            best = (value, unit[0], stage)
    return None if best is None else best[1:]
