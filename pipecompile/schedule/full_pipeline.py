"""A full pipeline: minibatches that follow each other under an asynchronous schedule, simulated,
and how long one of them takes once the pipeline is full.

With p stages, stage s keeps p − s microbatches in flight and then takes turns, as
continuous_order.py says. So what it does for a microbatch waits, in the end, for what it or another
stage did a few microbatches before:

    F(s, j) ─▶ … ─▶ F(t, j) ─▶ R, B(t, j − (p − t) + 1) ─▶ … ─▶ B(s, …) ─▶ F(s, j + t − s + 1)

All circuits of waiting have that form: up from a stage s to a stage t, and down again. In the end
the slowest circuit sets the pace of all stages. For t = s it is the work of one rank; with messages
that take no time, none of the others is slower.

Replicas of a stage share its microbatches, so other circuits are possible, also through the sums of
their gradients. `replica_waits.py` lists what waits in them, and the heaviest is searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, Action, Kind, Schedule, Timeline
from pipecompile.ir.stage_ranks import has_stage_replicas
from pipecompile.schedule.asynchronous_versions import PipelineSize, rule_of
from pipecompile.schedule.continuous_order import ContinuousOrder, UpdatedWeights
from pipecompile.schedule.heaviest_circuit import heaviest_circuit
from pipecompile.schedule.problem import PlacedProblem
from pipecompile.schedule.replica_waits import waits_of_minibatch
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.stages import problem_of_plan

__all__ = ["full_pipeline_ns", "simulate_minibatches"]


def full_pipeline_ns(problem: PlacedProblem) -> Fraction:
    """Return what a microbatch takes in a full pipeline: exactly the pace of the simulator, in the
    limit of many microbatches.

    It is the mean weight of the heaviest circuit (see Baccelli et al., Synchronization and
    Linearity, 1992, theorem 3.28). Each stage must have a rank of its own, or several. Steps of
    optimizers and what sums over replicas take are not in it. Where one microbatch in each
    minibatch is not recomputed, that counts by its share.
    """
    if has_stage_replicas(problem.placement):
        edges = list(waits_of_minibatch(problem))
        nodes = 2 * problem.stages * problem.microbatches
        return heaviest_circuit(edges, nodes) / problem.microbatches
    stages = range(problem.stages)
    return max(_pace(problem, s, t) for s in stages for t in stages[s:])


def _pace(problem: PlacedProblem, first: int, last: int) -> Fraction:
    """Return the mean weight of the circuit from stage `first` up to `last` and back."""
    costs = problem.costs[first : last + 1]
    # Two stages with F 1, B 2 and messages of 1 ns: the circuit over both takes 2
    # × 3 + 2 = 8 for two microbatches, 4 for each, more than the 3 of one rank's
    # own work. The simulator needs 43 ns for 10 microbatches, and 83 for 20.
    compute_ns = sum(each.forward_ns + each.backward_ns for each in costs)
    messages_ns = sum(problem.forward_transfer_ns[first:last])
    messages_ns += sum(problem.backward_transfer_ns[first:last])
    # The others recompute before the gradient that they wait for is there.
    turn, is_end = problem.costs[last], last + 1 == problem.stages
    kept = Fraction(turn.except_last, problem.microbatches)
    recompute_ns = turn.recompute_ns * (1 - kept) if turn.recompute and not is_end else 0
    return (compute_ns + messages_ns + recompute_ns) / Fraction(len(costs))


def simulate_minibatches(plan: Plan, count: int) -> Timeline:
    """Return the timeline of `count` minibatches that follow each other, from the empty pipeline to
    the empty one. Microbatches are numbered through.

    The plan's schedule must be asynchronous. Forwards are recomputed where they are in the plan.
    """
    schedule = _minibatches(plan, count)
    problem = replace(problem_of_plan(plan), microbatches=schedule.microbatches)
    return simulate(problem, schedule)


def _minibatches(plan: Plan, count: int) -> Schedule:
    """Return the order of `count` minibatches on all ranks."""
    planned = plan.schedule
    rule = rule_of(planned.weight_versions)
    assert rule is not None, "other schedules empty the pipeline after each minibatch"
    recomputed = {(a.stage, a.microbatch) for _, a in planned if a.kind is Kind.RECOMPUTE}
    size = PipelineSize.of(planned.placement, plan.microbatches)
    through = count * plan.microbatches
    rows: list[list[Action]] = [[] for _ in range(plan.ranks)]
    for stage, ranks in enumerate(planned.stage_ranks):
        for replica, rank in enumerate(ranks):
            weights = [UpdatedWeights(stage, deferred=False)]
            order = ContinuousOrder(size, rule, {stage: weights}, recomputed, replica=replica)
            rows[rank] += _without_versions(order.until(through, through))
    return Schedule.of(planned.name, through, planned.placement, rows)


def _without_versions(actions: Iterator[Action]) -> Iterator[Action]:
    """Yield compute actions and the steps of optimizers, without versions, which take no time."""
    kinds = {*COMPUTE, Kind.STEP}
    return (action._replace(version=None) for action in actions if action.kind in kinds)
