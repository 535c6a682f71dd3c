"""Stages with replicas without end: sound schedules of any length, and the pace of many."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import COMPUTE, Action, Kind, Schedule
from pipecompile.ir.stage_ranks import placement_of, stage_ranks
from pipecompile.schedule.asynchronous_versions import (
    DOUBLE_BUFFERED,
    STASHED,
    PipelineSize,
    VersionRule,
)
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.continuous_order import ContinuousOrder, UpdatedWeights
from pipecompile.schedule.full_pipeline import full_pipeline_ns
from pipecompile.schedule.named_orders import generate, lasting_microbatches, weight_copies
from pipecompile.schedule.problem import PlacedProblem, StageCosts
from pipecompile.schedule.replicated_order import ReplicatedOrder
from pipecompile.schedule.simulator import simulate
from tests.schedule.cases import MINIBATCHES, RULES, STALE

REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda n: max(n) > 1)


def size_of(replicas: list[int], rule: VersionRule, times: int) -> PipelineSize:
    """Stages of so many ranks and a last one of one, with as few microbatches as can be, times so
    many.
    """
    name = f"pipedream{'-2bw' if rule is DOUBLE_BUFFERED else ''}"
    least = lcm(*replicas) * times
    if name == "pipedream-2bw":
        least = lasting_microbatches(name, placement_of([*replicas, 1]), least)
    return PipelineSize((*replicas, 1), least)


def row_of(order: ReplicatedOrder, ends: set[int]) -> list[Action]:
    """The row of a rank, or process, that trains on minibatches one by one and is drained after
    each of `ends`.
    """
    each, row, drained = order.size.microbatches, [], 0
    for minibatch in range(MINIBATCHES):
        read = min(MINIBATCHES, max(minibatch + 1 + order.size.read_ahead, drained))
        row += order.until((minibatch + 1) * each, read * each)
        if minibatch in ends:
            row += order.until(read * each, read * each)
            drained = read
    return [action for action in row if action.kind is not Kind.REDUCE]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(RULES), REPLICAS, st.integers(1, 2), st.sets(st.integers(0, 4)))
def test_ranks_never_wait_for_each_other_in_vain(
    rule: VersionRule, replicas: list[int], times: int, ends: set[int]
) -> None:
    """Each microbatch once, versions as the rule has them, and no deadlock, even if sends block."""
    size = size_of(replicas, rule, times)
    count, placement = size.microbatches * MINIBATCHES, placement_of(size.replicas)
    ranks = range(sum(size.replicas))
    rows = [row_of(ReplicatedOrder(size, rule, {}, rank=rank), ends) for rank in ranks]
    schedule = Schedule.of("continuous", count, placement, rows, rule.weight_versions)
    hops = size.stages - 1
    costs = (StageCosts(1, 2),) * size.stages
    free, sent = (0,) * hops, (True,) * hops
    problem = PlacedProblem(placement, count, costs, free, free, sent)
    # A drained run goes on with the versions that it would have read: older ones than there are.
    faults = [each for each in check_schedule(schedule, problem) if not (ends and STALE in each)]
    assert faults == []


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(RULES), REPLICAS, st.integers(1, 2), st.sets(st.integers(0, 4)))
def test_one_process_takes_all_and_updates_each_stage_once(
    rule: VersionRule, replicas: list[int], times: int, ends: set[int]
) -> None:
    size = size_of(replicas, rule, times)
    stages = range(size.stages)
    weights = {stage: [UpdatedWeights(stage, deferred=False)] for stage in stages}
    newest, done = dict.fromkeys(stages, 0), set()
    for action in row_of(ReplicatedOrder(size, rule, weights), ends):
        stage, kind, microbatch, version = action
        assert microbatch is not None and version is not None
        if kind is Kind.STEP:
            newest[stage] += 1
            assert (version, microbatch + 1) == (newest[stage], version * size.microbatches)
            continue
        beside = stage - 1 if kind is Kind.FORWARD else stage + 1
        assert beside not in stages or (beside, kind, microbatch) in done
        assert kind is Kind.BACKWARD or version <= newest[stage]
        done.add((stage, kind, microbatch))
    assert len(done) == 2 * size.stages * size.microbatches * MINIBATCHES
    assert set(newest.values()) == {MINIBATCHES}


@st.composite
def problems(draw: st.DrawFn) -> PlacedProblem:
    """Stages with replicas, of which some recompute; messages that may take longer."""
    replicas = [*draw(REPLICAS), 1]
    times = st.integers(1, 20)
    hops = len(replicas) - 1
    costs = [
        StageCosts(
            draw(times),
            draw(times),
            recompute_ns=draw(times),
            recompute=draw(st.booleans()) and stage < hops,
        )
        for stage in range(len(replicas))
    ]
    forward, backward = (
        tuple(draw(st.lists(st.integers(0, 20), min_size=hops, max_size=hops))) for _ in range(2)
    )
    microbatches = lcm(*replicas) * draw(st.integers(1, 2))
    return PlacedProblem(
        placement_of(replicas), microbatches, tuple(costs), forward, backward, (True,) * hops
    )


def simulated_ns(problem: PlacedProblem, minibatches: int) -> int:
    """What so many minibatches take from the empty pipeline to the empty one."""
    size = PipelineSize.of(problem.placement, problem.microbatches)
    count = minibatches * size.microbatches
    recomputed = {
        (stage, microbatch)
        for stage, recomputes in enumerate(problem.recompute)
        for microbatch in range(size.microbatches)
        if recomputes
    }
    rows = []
    for stage, ranks in enumerate(stage_ranks(problem.placement)):
        for replica in range(len(ranks)):
            weights = {stage: [UpdatedWeights(stage, deferred=False)]}
            order = ContinuousOrder(size, STASHED, weights, recomputed, replica=replica)
            kinds = {*COMPUTE, Kind.STEP}
            row = [a for a in order.until(count, count) if a.kind in kinds]
            rows.append([action._replace(version=None) for action in row])
    schedule = Schedule.of("1f1b", count, problem.placement, rows)
    return simulate(replace(problem, microbatches=count), schedule).makespan_ns


@settings(max_examples=12, deadline=None)
@given(problems())
def test_the_pace_is_that_of_many_minibatches(problem: PlacedProblem) -> None:
    pace = full_pipeline_ns(problem) * problem.microbatches
    # Filling and emptying take no longer than everything does once, however many there are.
    once = sum(each.forward_ns + each.backward_ns + each.recompute_ns for each in problem.costs)
    once += sum(problem.forward_transfer_ns) + sum(problem.backward_transfer_ns)
    for count in (6, 60):
        assert abs(simulated_ns(problem, count) - pace * count) <= once * problem.microbatches


def test_replicas_wait_for_the_gradients_of_each_other() -> None:
    """Two ranks of 3 + 6 before one of 1 + 2: nothing is waited for if they begin together, but the
    second one begins when the first gives the last stage its turn.
    """
    problem = PlacedProblem((0, 2), 2, (StageCosts(3, 6), StageCosts(1, 2)), (0,), (0,), (True,))
    assert full_pipeline_ns(problem) == 9 / 2
    slow = replace(problem, forward_transfer_ns=(30,))
    # Both microbatches of a round go there and back, two rounds at a time.
    twice = 2 * full_pipeline_ns(slow)
    assert simulated_ns(slow, 60) - simulated_ns(slow, 20) == pytest.approx(40 * twice, rel=0.02)
    assert full_pipeline_ns(slow) > 9 / 2


def test_orders_and_copies_of_a_minibatch_alone() -> None:
    schedule = generate("pipedream", (0, 2), 4)
    assert [" ".join(row) for row in schedule.actions] == [
        "0F0@0 0F2@0 0B0@0 0B2@0 0STEP2@1",
        "0F1@0 0F3@0 0B1@0 0B3@0 0STEP3@1",
        "1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1F3@0 1B3@0 1STEP3@1",
    ]
    # Begun ahead: one round of 7, and of the stage behind nothing.
    assert [each.own for each in weight_copies("pipedream", placement_of([7, 1]), 7)] == [2, 1]
    on = placement_of([8, 3, 1])
    assert [each.own for each in weight_copies("pipedream", on, 24)] == [2, 2, 1]
    assert [each.own for each in weight_copies("pipedream-vertical-sync", on, 24)] == [2, 2, 2]
    assert [each.own for each in weight_copies("pipedream-2bw", on, 24)] == [2, 2, 2]


def test_ranks_of_a_stage_must_have_equally_many_microbatches() -> None:
    with pytest.raises(InputError, match="but there are 3; use a multiple of 2, or choose one of"):
        generate("pipedream", (0, 2), 3)
    with pytest.raises(InputError, match="at least 3 microbatches on 4 ranks, but there are 2"):
        generate("pipedream-2bw", (0, 1, 3), 2)
