"""The stages of an assignment: what each runs, costs, holds and passes on. Needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.module_paths import block_of
from pipecompile.ir.plan import Boundary, OwnedParameter, Route, Stage
from pipecompile.recompute.planner import RecomputePlanner
from pipecompile.recompute.policies import NO_RECOMPUTE, StageRecompute

__all__ = ["owners_of", "routes_of", "stages_of"]


def stages_of(
    graph: CostGraph,
    assignment: Mapping[str, int],
    planner: RecomputePlanner,
    *,
    weighed: bool = True,
) -> tuple[Stage, ...]:
    """The stages that `assignment` (node to stage) makes of the graph; what they hold is left out unless `weighed`.

    InfeasibleError if a stage has to compute something again to fit its rank, or to save otherwise, and cannot.
    """
    k = planner.options.k
    names = [tuple(n.name for n in graph.nodes if assignment[n.name] == s) for s in range(k)]
    boundaries = [tuple(_crossing(graph, assignment, stage)) for stage in range(-1, k)]
    every = planner.of_all(names) if weighed else [NO_RECOMPUTE] * k
    for index, again in enumerate(every):
        if again is None:
            forms = " or in whatever form it saves" if planner.options.saving else ""
            rank = planner.view.placement[index]
            raise InfeasibleError(f"rank {rank} does not fit, whatever it computes again{forms}")
    return tuple(
        _stage(graph, nodes, again, boundaries[index : index + 2])
        for index, (nodes, again) in enumerate(zip(names, every, strict=True))
        if again is not None
    )


def _stage(
    graph: CostGraph,
    names: tuple[str, ...],
    again: StageRecompute,
    boundaries: Sequence[tuple[Boundary, ...]],
) -> Stage:
    nodes = [graph.by_name[name] for name in names]
    return Stage(
        blocks=tuple(_blocks(nodes)),
        modules=tuple(module_ranges(node.module for node in nodes)),
        groups=tuple(sorted({node.group for node in nodes if node.group is not None})),
        forward_ns=sum(node.forward_ns for node in nodes),
        backward_ns=sum(node.backward_ns for node in nodes),
        backward_input_ns=_sum_if_known(node.backward_input_ns for node in nodes),
        backward_weight_ns=_sum_if_known(node.backward_weight_ns for node in nodes),
        recompute_ns=again.ns - sum(run.ns for run in again.saving),
        recompute_bound_ns=again.least,
        finish_ns=sum(node.finish_ns for node in nodes),
        inputs=boundaries[0],
        outputs=boundaries[1],
        recompute=again.kind,
        regions=again.regions,
        saving=again.saving,
        footprint=again.footprint,
    )


def _blocks(nodes: Iterable[Node]) -> Iterable[tuple[str, ...]]:
    """The names of the nodes, in runs that lie in one block of the model."""
    for _, run in groupby(nodes, key=lambda node: block_of(node.module)):
        yield tuple(node.name for node in run)


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _crossing(graph: CostGraph, assignment: Mapping[str, int], stage: int) -> Iterable[Boundary]:
    """The tensors that go from `stage` to the next one, relayed ones included, in the order of the graph."""
    for tensor in graph.tensors:
        last = max((assignment[name] for name in tensor.consumers), default=-1)
        if assignment[tensor.producer] <= stage < last:
            yield Boundary(
                name=tensor.producer, bytes=tensor.bytes, gradient_bytes=tensor.gradient_bytes
            )


def routes_of(graph: CostGraph, assignment: dict[str, int]) -> Iterable[Route]:
    """The tensors that are wanted later than in the stage after their producer's."""
    for tensor in graph.tensors:
        first = assignment[tensor.producer]
        last = max((assignment[name] for name in tensor.consumers), default=first)
        if last - first > 1:
            yield Route(name=tensor.producer, stages=tuple(range(first, last + 1)))


def owners_of(graph: CostGraph, stages: Sequence[Stage]) -> Iterable[OwnedParameter]:
    """Every parameter with the stages that hold it; one that no node reads stays with the first stage."""
    readers = [
        {name for node in stage.nodes for name in graph.by_name[node].parameters}
        for stage in stages
    ]
    for parameter in graph.parameters:
        holders = [
            index for index, names in enumerate(readers) if parameter.name in names
        ] or [0]
        yield OwnedParameter(
            name=parameter.name,
            aliases=parameter.aliases,
            bytes=parameter.bytes,
            trainable=parameter.trainable,
            owner=holders[0],
            stages=tuple(holders),
        )


def module_ranges(paths: Iterable[str]) -> Iterable[str]:
    """Module paths as ranges: `transformer.h.0-2` for blocks 0 to 2, each with all that lies in it."""
    blocks = [block for block, _ in groupby(block_of(path) for path in paths) if block]
    for parent, run in groupby(
        dict.fromkeys(blocks), key=lambda block: re.sub(r"\.\d+$", "", block)
    ):
        members = list(run)
        numbers = [block[len(parent) + 1 :] for block in members]
        yield f"{parent}.{numbers[0]}-{numbers[-1]}" if len(members) > 1 else members[0]
