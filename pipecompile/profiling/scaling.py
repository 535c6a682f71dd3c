"""Node costs scaled such that they add up to what whole stages were measured to take. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.plan import Stage
from pipecompile.ir.schedule import Kind

__all__ = ["Times", "apportioned", "scaled"]

Times = Mapping[Kind, int]
"""Nanoseconds of a stage's actions for one microbatch; REDUCE is what ends a step."""


def scaled(graph: CostGraph, stages: Sequence[Stage], times: Sequence[Times]) -> CostGraph:
    """The graph whose nodes add up, stage by stage, to `times`, each in proportion to what it cost before.

    A stage's forward is the mean of its forward and its recompute, if it has one: a plan's node has one time for both.
    Of a backward that computes regions again, that is a part, and what saving in other forms takes is one of both.
    Halves of a backward that were not measured are scaled as the whole is. What ends the step is its last node's.
    """
    changed: dict[str, Node] = {}
    for stage, measured in zip(stages, times, strict=True):
        nodes = [graph.by_name[name] for name in stage.nodes]
        changed.update(
            (node.name, node) for node in _scaled_nodes(nodes, _of_nodes(stage, measured))
        )
    return msgspec.structs.replace(graph, nodes=tuple(changed[node.name] for node in graph.nodes))


def _of_nodes(stage: Stage, measured: Times) -> Times:
    """Without what regions and saving take: as much more or less than expected as the forward does."""
    if not (stage.regions or stage.encoded_runs) or Kind.BACKWARD not in measured:
        return measured
    packing, unpacking = (
        sum(run.forward_ns for run in stage.encoded_runs),
        sum(run.backward_ns for run in stage.encoded_runs),
    )
    expected = max(1, stage.forward_ns + packing)
    more = (stage.recompute_ns + unpacking) * measured[Kind.FORWARD] // expected
    forward = measured[Kind.FORWARD] - packing * measured[Kind.FORWARD] // expected
    return {
        **measured,
        Kind.FORWARD: forward,
        Kind.BACKWARD: max(0, measured[Kind.BACKWARD] - more),
    }


def _scaled_nodes(nodes: Sequence[Node], measured: Times) -> Iterable[Node]:
    forwards = [measured[kind] for kind in (Kind.FORWARD, Kind.RECOMPUTE) if kind in measured]
    forward = apportioned(round(sum(forwards) / len(forwards)), [node.forward_ns for node in nodes])
    before = [node.backward_ns for node in nodes]
    whole = measured.get(Kind.BACKWARD, sum(before))
    backward = apportioned(whole, before)
    inputs = _half(
        nodes, measured.get(Kind.BACKWARD_INPUT), whole, lambda node: node.backward_input_ns
    )
    weights = _half(
        nodes, measured.get(Kind.BACKWARD_WEIGHT), whole, lambda node: node.backward_weight_ns
    )
    for index, node in enumerate(nodes):
        yield msgspec.structs.replace(
            node,
            forward_ns=forward[index],
            backward_ns=backward[index],
            backward_input_ns=inputs[index],
            backward_weight_ns=weights[index],
            per_step_ns=measured.get(Kind.REDUCE, 0) if node is nodes[-1] else 0,
        )


def _half(
    nodes: Sequence[Node], measured: int | None, whole: int, time: Callable[[Node], int | None]
) -> Sequence[int | None]:
    """One half of the nodes' backwards, None where it is not known of all."""
    known = [value for value in map(time, nodes) if value is not None]
    if len(known) < len(nodes):
        return [None] * len(nodes)
    if measured is None:
        before = sum(node.backward_ns for node in nodes)
        measured = sum(known) * whole // before if before else sum(known)
    return apportioned(measured, known)


def apportioned(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts in proportion to `weights`, or in equal ones if these are all zero; the sum is exact."""
    if not any(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    ends = [total * reached // whole for reached in accumulate(weights, initial=0)] if whole else []
    return [right - left for left, right in pairwise(ends)]
