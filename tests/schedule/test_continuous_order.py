"""1F1B without end: of any length it is a sound schedule with the versions of its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.ir.schedule import Action, Kind, Schedule
from pipecompile.schedule.asynchronous_versions import (
    DOUBLE_BUFFERED,
    STASHED,
    VERTICAL_SYNC,
    PipelineSize,
    VersionRule,
)
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.continuous_order import ContinuousOrder, UpdatedWeights
from pipecompile.schedule.named_orders import generate
from tests.schedule.cases import MINIBATCHES, RULES, STALE, equal


def row_of(rule: VersionRule, size: PipelineSize, stage: int, ends: list[int]) -> list[Action]:
    """The row of a rank that trains on minibatches one by one, all but the last ones read ahead,
    and is drained after each minibatch in `ends`.
    """
    weights = [UpdatedWeights(stage, deferred=False)]
    order = ContinuousOrder(size, rule, {stage: weights}, messages=True)
    ahead, each, row, drained = size.read_ahead, size.microbatches, [], 0
    for minibatch in range(MINIBATCHES):
        read = min(MINIBATCHES, max(minibatch + 1 + ahead, drained))
        row += order.until((minibatch + 1) * each, read * each)
        if minibatch in ends:
            row += order.until(read * each, read * each)
            drained = read
    return [action for action in row if action.kind is not Kind.REDUCE]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 5), st.integers(1, 4), st.sets(st.integers(0, 4)))
def test_ranks_never_wait_for_each_other_in_vain(
    rule: VersionRule, ranks: int, microbatches: int, ends: set[int]
) -> None:
    if rule is DOUBLE_BUFFERED:
        microbatches = max(microbatches, ranks - 1)
    size = PipelineSize((1,) * ranks, microbatches)
    rows = [row_of(rule, size, stage, sorted(ends)) for stage in range(ranks)]
    count = microbatches * MINIBATCHES
    schedule = Schedule.of("continuous", count, range(ranks), rows, rule.weight_versions)
    problem = replace(equal(list(range(ranks)), count), caps=None)
    # A drained run goes on with the versions that it would have read: older ones than there are.
    faults = [each for each in check_schedule(schedule, problem) if not (ends and STALE in each)]
    assert faults == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("pipedream", STASHED),
        ("pipedream-vertical-sync", VERTICAL_SYNC),
        ("pipedream-2bw", DOUBLE_BUFFERED),
    ],
)
def test_one_minibatch_is_the_named_schedule(name: str, rule: VersionRule) -> None:
    size = PipelineSize((1,) * 3, 7)
    for stage, row in enumerate(generate(name, range(3), 7).rows):
        order = ContinuousOrder(size, rule, {stage: [UpdatedWeights(stage, deferred=False)]})
        assert tuple(a for a in order.until(7, 7) if a.kind is not Kind.REDUCE) == row
