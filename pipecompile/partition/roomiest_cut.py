"""The cut that leaves the fullest rank the most room, by lower bounds of what nodes hold.

Where memory is short it is the cut to ask of: how much is missing, and whether other options would
do. No stage is priced, so it takes little time beside a search. Needs no PyTorch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pipecompile.ir.links import FREE
from pipecompile.partition.chains import Chain, Chains
from pipecompile.partition.missing_memory import missing_or_spare_bytes
from pipecompile.partition.orders import topological_orders
from pipecompile.partition.prefix_cuts import BestChain, cut_order
from pipecompile.partition.prefixes import Prefixes
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.unit_graph import UnitGraph
from pipecompile.partition.windows import Limit

__all__ = [
    "LARGEST_BYTES",
    "PRECISION_PARTS",
    "RoomiestCut",
    "first_cut",
    "roomiest_cut",
    "stages_of",
]

LARGEST_BYTES = 1 << 60  # more than any rank has
PRECISION_PARTS = 100  # what is missing is found to this part


class RoomiestCut(NamedTuple):
    """A cut of the graph's own order: the nodes of each stage.

    By bounds every cap must grow by `missing` bytes for it; below 0 that much room is left.
    """

    stages: tuple[tuple[str, ...], ...]
    missing: int

    @property
    def assignment(self) -> dict[str, int]:
        """The stage of each node."""
        return {name: stage for stage, names in enumerate(self.stages) for name in names}


def roomiest_cut(unit_graph: UnitGraph) -> RoomiestCut | None:
    """Return the cut with the most room by bounds; None if there is none, whatever ranks have.

    Stages that share a rank have equal shares of its cap.
    """
    problem = _alone_on_ranks(unit_graph.problem)
    assert problem.memory is not None
    memory = problem.memory

    def cut_with(more: int) -> Chain | None:
        caps = tuple(cap + more for cap in memory.caps)
        return first_cut(unit_graph, replace(problem, memory=replace(memory, caps=caps)))

    least = missing_or_spare_bytes(problem)
    step = max(1, (max(memory.caps) + least) // PRECISION_PARTS)
    missing = least - 1 + step
    # The bound knows nothing of units and pins.
    while (chain := cut_with(missing)) is None:
        missing, step = missing + step, 2 * step
        if missing > LARGEST_BYTES:
            return None
    return RoomiestCut(stages_of(unit_graph, chain), missing)


def _unpriced(chains: Chains, limit: Limit) -> Chain | None:
    """Return the best chain of a problem that has no prices."""
    return chains.best(chains.problem.objective, limit)


def first_cut(
    unit_graph: UnitGraph, problem: PartitionProblem, best: BestChain = _unpriced
) -> Chain | None:
    """Return a cut of the units of a graph in one order, by `problem`; None without one.

    `best` searches chains, with the prices of the problem if it has any.
    """
    # The same units, so that rows of its prefixes are places in the same order.
    plain = UnitGraph(problem, unit_graph.units)
    prefixes = Prefixes(plain, next(iter(topological_orders(plain))))
    return cut_order(prefixes, Limit(), best)


def stages_of(unit_graph: UnitGraph, chain: Chain) -> tuple[tuple[str, ...], ...]:
    """Return the nodes of each stage of a cut of the graph's own order."""
    order = next(iter(topological_orders(unit_graph)))
    stages = []
    for start, stop in pairwise(chain.rows):
        units = (unit_graph.units[unit] for unit in order[start:stop])
        stages.append(tuple(name for unit in units for name in unit))
    return tuple(stages)


def _alone_on_ranks(problem: PartitionProblem) -> PartitionProblem:
    """Return the problem without prices, with each stage alone on a rank."""
    memory = problem.memory
    assert memory is not None
    shares = Counter(problem.stage_ranks)
    caps = tuple(memory.caps[rank] // shares[rank] for rank in problem.stage_ranks)
    unpriced = replace(memory.unpriced, caps=caps)
    if problem.ranks == problem.k:
        return replace(problem, memory=unpriced)
    return replace(problem, placement=None, speeds=None, links=FREE, memory=unpriced)
