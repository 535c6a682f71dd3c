"""Other cuts that are about as fast as a plan's: what a plan under noise is chosen from.

`planner.draft` imports it when it drafts a plan under noise, and not before: solvers need numpy and
networkx, which reading a plan does not. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from pipecompile.ir.links import Links
from pipecompile.ir.plan import Plan, Search
from pipecompile.ir.robustness import is_close
from pipecompile.partition.alternatives import alternative_cuts
from pipecompile.partition.edge_moves import edge_parts, loads_after, moved
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.planner.partition import SHORT_SECONDS, other_objectives, with_all_time
from pipecompile.planner.partition_problem import problem_of
from pipecompile.recompute.planner import RecomputePlanner

__all__ = ["close_cuts"]

MOST_CUTS = 8  # each is scheduled and its memory counted, which a search makes slow


def close_cuts(planner: RecomputePlanner, links: Links, plan: Plan) -> Iterator[Partition]:
    """Yield cuts beside that of `plan`, shortest simulated step first and at most eight.

    They are the cuts of the other objectives, and those in which the least that takes any time lies
    beyond one boundary. A step is that of the named schedule by which cuts are judged, and within
    2 % of the shortest one. Each is scored by the plan's own objective, under its lower bound.
    """
    problem = problem_of(planner.graph, planner.options, links, planner.view.placement)
    assert problem.step_ns is not None
    # Copied nodes are no nodes of the problem.
    own = {node.name: plan.assignment[node.name] for node in problem.graph.nodes}
    own_ns = problem.step_ns(own)
    found: list[tuple[int, Mapping[str, int]]] = []
    for assignment in _other_cuts(planner, problem, own):
        if all(assignment != known for known in (own, *(cut for _, cut in found))):
            found.append((problem.step_ns(assignment), assignment))
    found.sort(key=lambda cut: cut[0])
    shortest_ns = min([own_ns, *(step_ns for step_ns, _ in found)])
    for step_ns, assignment in found[:MOST_CUTS]:
        if is_close(step_ns, shortest_ns):
            yield _scored(planner, problem, links, assignment, plan.search)


def _other_cuts(
    planner: RecomputePlanner, problem: PartitionProblem, assignment: Mapping[str, int]
) -> Iterator[Mapping[str, int]]:
    """Yield cuts that the constraints allow, some of them perhaps more than once."""
    objectives = other_objectives(planner.options)
    for cut in alternative_cuts(problem, objectives, seconds=SHORT_SECONDS):
        yield cut.assignment
    for stage in range(problem.k):
        for part in edge_parts(problem, assignment, stage):
            if not loads_after(problem, assignment, part).obstacle:
                yield moved(assignment, part)


def _scored(
    planner: RecomputePlanner,
    problem: PartitionProblem,
    links: Links,
    assignment: Mapping[str, int],
    search: Search,
) -> Partition:
    scored = with_all_time(planner, problem, links, assignment, search)
    # The hint about a faster objective is about the problem, and not about one cut of it.
    named = msgspec.structs.replace(scored.search, faster=search.faster)
    return replace(scored, search=named)
