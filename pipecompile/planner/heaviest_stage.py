"""Why the heaviest rank of a plan is not lighter, node by node. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipecompile.ir.explanation import EdgeMove, HeaviestRank, HeldBy, Undivided
from pipecompile.ir.graph import CostGraph
from pipecompile.partition.edge_moves import EdgePart, edge_parts, loads_after
from pipecompile.partition.objective import rank_loads, stage_loads
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.units import Unit

__all__ = ["edge_moves", "undivided"]


def undivided(
    problem: PartitionProblem,
    assignment: Mapping[str, int],
    heaviest: HeaviestRank,
    plain: CostGraph,
) -> Undivided:
    """Return the nodes of the heaviest rank that no cut of the problem parts and that take most.

    `plain` is the problem's graph without the groups that were asked for.
    """
    units = [unit for unit in problem.units if assignment[unit[0]] in heaviest.stages]
    kind = problem.kind(heaviest.stages[0])  # several stages of a rank are of one kind
    unit = max(units, key=lambda unit: problem.kind_compute_ns(unit, kind, last=True))
    longest = _longest(problem.graphs[kind], unit)
    return Undivided(
        node=longest,
        module=problem.graph.by_name[longest].module,
        node_ns=problem.kind_compute_ns([longest], kind, last=True),
        nodes=len(unit),
        ns=problem.kind_compute_ns(unit, kind, last=True),
        by=_held_by(problem, unit, plain),
    )


def _longest(graph: CostGraph, names: Iterable[str]) -> str:
    """Return the node that takes most: by it people know where several are."""
    nodes = (graph.by_name[name] for name in names)
    return max(nodes, key=lambda node: node.forward_ns + node.backward_ns).name


def _held_by(problem: PartitionProblem, unit: Unit, plain: CostGraph) -> HeldBy:
    """Return what holds the nodes of a unit together."""
    # From the narrowest reason to the widest: of nodes that the model groups itself it
    # would be no help to say that a granularity holds them. What is left are cycles, of
    # tensors or of the order in which gradients are summed, which only one stage can hold.
    if len(unit) == 1:
        return "node"
    if _is_one_group(plain, unit):
        return "model"
    if _is_one_group(problem.graph, unit):
        return "group"
    return "granularity" if problem.granularity in ("modules", "blocks") else "order"


def _is_one_group(graph: CostGraph, names: Iterable[str]) -> bool:
    groups = {graph.by_name[name].group for name in names}
    return len(groups) == 1 and None not in groups


def edge_moves(
    problem: PartitionProblem, assignment: Mapping[str, int], heaviest: HeaviestRank
) -> Iterator[EdgeMove]:
    """Yield what a move of either end of each stage of the heaviest rank would do."""
    before_ns = max(rank_loads(problem, stage_loads(problem, assignment)))
    for stage in heaviest.stages:
        for part in edge_parts(problem, assignment, stage):
            yield _edge_move(problem, assignment, part, before_ns)


def _edge_move(
    problem: PartitionProblem, assignment: Mapping[str, int], part: EdgePart, before_ns: int
) -> EdgeMove:
    moved = loads_after(problem, assignment, part)
    names = [name for unit in part.units for name in unit]
    kind = problem.kind(part.before)
    return EdgeMove(
        node=_longest(problem.graphs[kind], names),
        nodes=len(names),
        ns=problem.kind_compute_ns(names, kind, last=True),
        before=part.before,
        after=part.after,
        receiver_ns=moved.loads_ns[problem.stage_ranks[part.after]],
        heaviest_ns=(before_ns, max(moved.loads_ns)),
        obstacle=moved.obstacle,
    )
