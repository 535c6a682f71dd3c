"""What the actions of a minibatch wait for in a full pipeline whose stages have replicas.

With d microbatches of a rank in flight, its row is … B(i − d) F(i) B(i − d + 1) F(i + 1) …, of its
own microbatches i. So within a rank and between them

    B(i − d) ─▶ F(i)          F(i + d − 1) ─▶ [recompute] ─▶ B(i)          its order
    F(s − 1, m) ─▶ F(s, m)    B(s + 1, m) ─▶ B(s, m)                       messages
    last B of the minibatch, on all replicas ─▶ next F                     the sum of gradients

A minibatch is a period: what lies behind its last microbatch belongs to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir.schedule import Action, Kind
from pipecompile.schedule.asynchronous_versions import PipelineSize
from pipecompile.schedule.heaviest_circuit import Edge
from pipecompile.schedule.problem import PlacedProblem

__all__ = ["waits_of_minibatch"]


def waits_of_minibatch(problem: PlacedProblem) -> Iterator[Edge]:
    """Yield what the forwards and backwards of one minibatch wait for.

    They are numbered: forwards by stage and microbatch, and then backwards.
    """
    for stage in range(problem.stages):
        for microbatch in range(problem.microbatches):
            yield from _messages(problem, stage, microbatch)
            yield from _order(problem, stage, microbatch)
        yield from _sums(problem, stage)


def _messages(problem: PlacedProblem, stage: int, microbatch: int) -> Iterator[Edge]:
    """Yield the waits for the microbatch in the stages beside this one."""
    if stage:
        weight = problem.forward_transfer_ns[stage - 1] + problem.costs[stage].forward_ns
        yield _edge(problem, _forward(stage - 1, microbatch), _forward(stage, microbatch), weight)
    if stage + 1 < problem.stages and problem.gradient[stage]:
        weight = problem.backward_transfer_ns[stage] + problem.costs[stage].backward_ns
        yield _edge(problem, _backward(stage + 1, microbatch), _backward(stage, microbatch), weight)


def _order(problem: PlacedProblem, stage: int, microbatch: int) -> Iterator[Edge]:
    """Yield the waits for what the rank does before."""
    size, costs = _size(problem), problem.costs[stage]
    forward, backward = _forward(stage, microbatch), _backward(stage, microbatch)
    ahead, replicas = size.ahead(stage), size.replicas[stage]
    # d microbatches of this rank before this one: its own are
    # `replicas` apart, and `ahead` is (d − 1) × replicas.
    before = _backward(stage, microbatch - ahead - replicas)
    yield _edge(problem, before, forward, costs.forward_ns)
    is_recomputed = problem.recomputes(Action(stage, Kind.RECOMPUTE, microbatch))
    weight = costs.backward_ns + (costs.recompute_ns if is_recomputed else 0)
    yield _edge(problem, _forward(stage, microbatch + ahead), backward, weight)


def _sums(problem: PlacedProblem, stage: int) -> Iterator[Edge]:
    """Yield the waits of each replica, behind its last backward, for those of the others."""
    size, costs = _size(problem), problem.costs[stage]
    last_round = range(problem.microbatches - size.replicas[stage], problem.microbatches)
    for own in last_round:
        # This is the forward that its row has directly behind B(own), by the order in `_order`.
        begun = _forward(stage, own + size.ahead(stage) + size.replicas[stage])
        for other in last_round:
            yield _edge(problem, _backward(stage, other), begun, costs.forward_ns)


def _size(problem: PlacedProblem) -> PipelineSize:
    return PipelineSize.of(problem.placement, problem.microbatches)


def _forward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.FORWARD, microbatch)


def _backward(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.BACKWARD, microbatch)


def _edge(problem: PlacedProblem, source: Action, target: Action, weight: int) -> Edge:
    (begin, first), (end, second) = _place(problem, source), _place(problem, target)
    return Edge(first, second, weight, end - begin)


def _place(problem: PlacedProblem, action: Action) -> tuple[int, int]:
    """Return the minibatch of an action, from this one on, and its number there."""
    assert action.microbatch is not None, "compute actions name their microbatch"
    # Python rounds down: with 4 microbatches, −1 is number 3 of the minibatch before.
    minibatch, within = divmod(action.microbatch, problem.microbatches)
    row = action.stage + (problem.stages if action.kind is Kind.BACKWARD else 0)
    return minibatch, row * problem.microbatches + within
