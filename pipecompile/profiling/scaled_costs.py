"""Node costs that are scaled so that they add up to the measured times of whole stages.

Called by the stage correction (`profiling/stage_correction.py`). Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.schedule import Kind
from pipecompile.ir.stage import Stage

__all__ = ["Times", "apportioned", "scaled"]

Times = Mapping[Kind, int]
"""Nanoseconds of a stage's actions for one microbatch; REDUCE stands for the end of a step."""


def scaled(graph: CostGraph, stages: Sequence[Stage], times: Sequence[Times]) -> CostGraph:
    """Return `graph` with nodes whose times add up to the measured `times` of each stage.

    Each node keeps its share of the stage. With costs of 100 and 300 ns, and a measured forward of
    600 ns, the two nodes of a stage get 150 and 450 ns.

    The forward of a stage is the mean of its forward and its recompute, if it has one, because a
    node has one time for both. Halves of a backward that were not measured are scaled as the whole
    backward is. The end of a step is assigned to the stage's last node.
    """
    scaled_by_name: dict[str, Node] = {}
    for stage, measured in zip(stages, times, strict=True):
        nodes = [graph.by_name[name] for name in stage.nodes]
        for node in _scaled_nodes(nodes, _without_recompute(stage, measured)):
            scaled_by_name[node.name] = node
    nodes_in_order = tuple(scaled_by_name[node.name] for node in graph.nodes)
    return msgspec.structs.replace(graph, nodes=nodes_in_order)


def _without_recompute(stage: Stage, measured: Times) -> Times:
    """Return the times without the share of recomputed regions and encodings.

    These were predicted, not measured: they are scaled as the forward is. For a forward predicted
    as 90 ns and 10 ns of encoding that is measured as 200 ns, 20 ns count as encoding.
    """
    if not (stage.regions or stage.encoded_runs) or Kind.BACKWARD not in measured:
        return measured
    encoding = sum(run.forward_ns for run in stage.encoded_runs)
    decoding = sum(run.backward_ns for run in stage.encoded_runs)
    # A stage whose predicted forward is 0 ns has no share to take: nothing is divided by zero.
    predicted = max(1, stage.forward_ns + encoding)
    in_forward = encoding * measured[Kind.FORWARD] // predicted
    in_backward = (stage.recompute_ns + decoding) * measured[Kind.FORWARD] // predicted
    return {
        **measured,
        Kind.FORWARD: measured[Kind.FORWARD] - in_forward,
        Kind.BACKWARD: max(0, measured[Kind.BACKWARD] - in_backward),
    }


def _scaled_nodes(nodes: Sequence[Node], measured: Times) -> Iterable[Node]:
    """Yield the nodes of a stage with times that add up to the measured ones."""
    forwards = [measured[kind] for kind in (Kind.FORWARD, Kind.RECOMPUTE) if kind in measured]
    mean_forward = round(sum(forwards) / len(forwards))
    forward = apportioned(mean_forward, [node.forward_ns for node in nodes])
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
    """Return one half of each node's backward; None for all if it is unknown for one.

    `measured` is that half of the stage, if it was measured, and `whole` the stage's backward.
    """
    known = [value for value in map(time, nodes) if value is not None]
    if len(known) < len(nodes):
        return [None] * len(nodes)
    if measured is None:  # only whole backwards were measured: both halves keep their shares
        before = sum(node.backward_ns for node in nodes)
        measured = sum(known) * whole // before if before else sum(known)
    return apportioned(measured, known)


def apportioned(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole parts of `total` in proportion to `weights`; their sum is exact.

    If all weights are zero, the parts are equal. The parts are differences of rounded partial sums:
    10 by weights 1, 1, 1 has the partial sums 3, 6, 10 and the parts 3, 3, 4.
    """
    if not any(weights):
        weights = [1] * len(weights)
    weight_sum = sum(weights)
    if not weight_sum:
        return []  # there are no parts
    # Each part rounded by itself would lose up to 1 ns a node, and a stage would no longer add up.
    ends = [total * reached // weight_sum for reached in accumulate(weights, initial=0)]
    return [right - left for left, right in pairwise(ends)]
