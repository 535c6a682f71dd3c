"""What is to be cut: the units of a cost graph in one order, the number of stages and what a cut must respect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.memory import Layout
from pipecompile.ir.plan import Link

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["COMMUNICATIONS", "OBJECTIVES", "Problem", "StageBytes", "units"]

OBJECTIVES = ("variance", "max-load")
COMMUNICATIONS = ("relay", "none")

# (layout, stage) → the bytes of every interval of units as that stage: table[start, stop]
StageBytes = Callable[[Layout, int], "NDArray[np.int64]"]


def units(graph: CostGraph) -> tuple[tuple[str, ...], ...]:
    """The nodes that must stay together, in a topological order as near as possible to the graph's own.

    Nodes of one group are one unit, and so are units on a cycle: stages never decrease along a tensor, so a cycle
    lies in one stage in every cut. The merge is exact. The group "inputs" comes first and "outputs" last.
    """
    index = {node.name: position for position, node in enumerate(graph.nodes)}
    first: dict[str, int] = {}
    for node in graph.nodes:
        if node.group is not None:
            first.setdefault(node.group, index[node.name])
    owner = {node.name: index[node.name] if node.group is None else first[node.group] for node in graph.nodes}
    merged = nx.DiGraph()
    merged.add_nodes_from(owner.values())
    merged.add_edges_from((owner[t.producer], owner[name]) for t in graph.tensors for name in t.consumers)
    merged.remove_edges_from(list(nx.selfloop_edges(merged)))
    acyclic = nx.condensation(merged)
    members: dict[int, list[str]] = {unit: [] for unit in acyclic}
    for name in index:
        members[acyclic.graph["mapping"][owner[name]]].append(name)
    last = acyclic.graph["mapping"].get(first.get("outputs"))
    order = nx.lexicographical_topological_sort(
        acyclic, key=lambda unit: len(index) if unit == last else index[members[unit][0]]
    )
    return tuple(tuple(members[unit]) for unit in order)


@dataclass(frozen=True)
class Problem:
    """A graph to be cut into `k` stages.

    `link` prices transfers; under `recompute` every stage but the last runs its forward twice. `stage_bytes` gives
    what each possible stage holds and `memory_bytes` the cap. `pin` fixes the stage of nodes; negative stages count
    from the end. InputError says what does not fit.
    """

    graph: CostGraph
    k: int
    objective: str = "variance"
    communication: str = "relay"
    link: Link = field(default_factory=Link)
    recompute: bool = False
    memory_bytes: int | None = None
    stage_bytes: StageBytes | None = None
    pin: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_unknown("objective", self.objective, OBJECTIVES)
        _refuse_unknown("communication", self.communication, COMMUNICATIONS)
        if self.k < 1:
            raise InputError(f"k={self.k}, but a pipeline has at least one stage")
        for name, stage in self.pin.items():
            if name not in self.graph.by_name:
                raise InputError(f"pin {name}={stage}: the graph has no such node; `pipecompile show` lists its nodes")
            if not -self.k <= stage < self.k:
                raise InputError(f"pin {name}={stage}: the stages are 0 … {self.k - 1}, or -1 … -{self.k} from the end")

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """See `units`; InfeasibleError if there are fewer than `k`."""
        found = units(self.graph)
        if self.k > len(found):
            raise InfeasibleError(
                f"k={self.k}, but the graph can be cut into at most {len(found)} stages{self._largest(found)}; "
                f"choose k ≤ {len(found)}"
            )
        return found

    def _largest(self, found: tuple[tuple[str, ...], ...]) -> str:
        joined = sorted((unit for unit in found if len(unit) > 1), key=len, reverse=True)[:3]
        names = (f"{self.graph.by_name[unit[0]].group or unit[0]} with {len(unit)} nodes" for unit in joined)
        return f" (nodes that stay together: {', '.join(names)})" if joined else ""

    @cached_property
    def pins(self) -> dict[tuple[str, ...], int]:
        """The stage of each pinned unit, in the order of the units."""
        stages = {name: stage % self.k for name, stage in self.pin.items()}
        pinned: dict[tuple[str, ...], int] = {}
        for unit in self.units:
            wanted = {stages[name]: name for name in unit if name in stages}
            if len(wanted) > 1:
                text = " and ".join(f"{name}={stage}" for stage, name in sorted(wanted.items()))
                raise InputError(f"pins {text}: these nodes cannot be separated; pin them to one stage")
            if wanted:
                pinned[unit] = next(iter(wanted))
        for (unit, stage), (later, lower) in pairwise(pinned.items()):
            if lower < stage:
                raise InfeasibleError(
                    f"pins put {unit[0]} in stage {stage} and {later[0]} in stage {lower}, "
                    f"but {later[0]} comes after {unit[0]}; swap or drop one"
                )
        return pinned

    def compute_ns(self, names: Iterable[str], *, last: bool) -> int:
        """The time of these nodes for one microbatch, in the last stage or in another one."""
        return sum(_compute_ns(self.graph.by_name[name], self.recompute and not last) for name in names)


def _compute_ns(node: Node, again: bool) -> int:
    return node.forward_ns * (1 + again) + node.backward_ns


def _refuse_unknown(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{what} {given!r} is not known; choose one of {', '.join(known)}")
