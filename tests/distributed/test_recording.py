"""Recorded runs of gloo ranks: every action once, in order, with what it waited for and sent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pipecompile.api.comparison import comparison_of, comparison_text
from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedAction, RecordedRun, RecordedStep
from pipecompile.ir.schedule import COMPUTE, Action, Kind
from pipecompile.schedule.full_pipeline import simulate_minibatches
from tests.distributed import recording_jobs as jobs
from tests.distributed.workers import Workers

SLEEP_NS = 300_000_000
SCHEDULES = ("1f1b", "zb-h1")


def recorded(workers: Workers, folder: Path, replicas: int, schedule: str) -> jobs.Recorded:
    """The plan, and the run that one of the ranks has."""
    results = workers.run(
        2 * replicas, jobs.recorded, 2, replicas, schedule, str(folder), folder=str(folder)
    )
    runs = [run for _, run in results if run is not None]
    assert results[0][1] is not None and len(runs) == 1
    return results[0]


def by_action(step: RecordedStep) -> dict[Action, RecordedAction]:
    return {Action.parse(a.action): a for rank in step.ranks for a in rank.actions}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_of_a_row_is_recorded_once_and_in_order(
    workers: Workers, tmp_path: Path, schedule: str
) -> None:
    plan, run = recorded(workers, tmp_path, 1, schedule)
    assert run is not None
    assert [step.number for step in run.steps] == [1, 2, 3]
    for step in run.steps:
        for rank, row in zip(step.ranks, plan.schedule.actions, strict=True):
            assert tuple(recorded.action for recorded in rank.actions) == row
            for before, after in pairwise(rank.actions):
                assert before.end_ns <= after.start_ns
            assert rank.peak_bytes is None  # on a CPU no allocator tells


def test_a_rank_waits_while_its_neighbour_sleeps(workers: Workers, tmp_path: Path) -> None:
    _, run = recorded(workers, tmp_path, 1, "1f1b")
    assert run is not None
    usual, slept, _ = map(by_action, run.steps)
    waiting, asleep = Action(1, Kind.FORWARD, 2), Action(0, Kind.FORWARD, 2)
    assert slept[asleep].work_ns >= SLEEP_NS
    # The other rank's clock is the same, so the message came when the sleep was over.
    assert slept[waiting].ready_ns >= slept[asleep].end_ns
    assert slept[waiting].waiting_ns > SLEEP_NS / 2
    assert slept[waiting].work_ns < SLEEP_NS
    assert usual[asleep].work_ns < SLEEP_NS


def test_messages_have_the_bytes_of_the_plan(workers: Workers, tmp_path: Path) -> None:
    plan, run = recorded(workers, tmp_path, 1, "1f1b")
    assert run is not None
    values = sum(tensor.bytes for tensor in plan.stages[0].outputs)
    gradients = sum(tensor.gradient_bytes for tensor in plan.stages[0].outputs)
    sizes = {
        Kind.SEND_FORWARD: values,
        Kind.RECEIVE_FORWARD: values,
        Kind.SEND_BACKWARD: gradients,
        Kind.RECEIVE_BACKWARD: gradients,
    }
    assert 0 < gradients <= values
    for action, of_action in by_action(run.steps[0]).items():
        assert of_action.bytes == sizes.get(action.kind, 0)


def test_a_run_is_compared_with_its_plan(workers: Workers, tmp_path: Path) -> None:
    plan, run = recorded(workers, tmp_path, 1, "zb-h1")
    assert run is not None and not run.is_in_turns
    assert RecordedRun.load(tmp_path / "run.json") == run
    comparison = comparison_of(plan, run)
    assert len(comparison.steps) == 3
    text = comparison_text(comparison)
    assert "input backward" in text and "weight backward" in text and "waiting" in text


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("schedule", "microbatches", "on"),
    [
        ("pipedream-2bw", 2, (1, 1)),
        ("pipedream", 1, (1, 1)),
        ("pipedream-vertical-sync", 1, (1, 1)),
        ("pipedream", 2, (2, 1)),
    ],
)
def test_minibatches_in_flight_are_recorded_from_the_empty_pipeline_to_the_empty_one(
    workers: Workers, tmp_path: Path, schedule: str, microbatches: int, on: tuple[int, ...]
) -> None:
    args = schedule, microbatches, on
    results = workers.run(sum(on), jobs.recorded_in_flight, *args, folder=str(tmp_path))
    assert all(is_same for _, _, is_same in results)
    plan, run, _ = results[0]
    assert run is not None and results[1][1] is None
    assert len(run.steps) >= 2
    first, *rest = run.steps
    # What was in flight before the block was drained, and nothing was left out behind it.
    assert first.number >= 1
    for before, after in pairwise(run.steps):
        assert after.number == before.number + before.microbatches // microbatches
    for step in run.steps:
        for rank, row in zip(
            step.ranks,
            simulate_minibatches(plan, step.microbatches // microbatches).events,
            strict=True,
        ):
            recorded = [Action.parse(each.action) for each in rank.actions]
            assert [a for a in recorded if a.kind in COMPUTE] == [e.action for e in row]
            steps = [a for a in recorded if a.kind is Kind.STEP]
            # The second rank has a copy of the tied table, and steps it too.
            assert len(steps) == len(set(steps)) > 0
            for one, other in pairwise(rank.actions):
                assert one.end_ns <= other.start_ns
    assert comparison_of(plan, run).minibatches == max(s.microbatches for s in rest) // microbatches


def test_the_first_replica_is_recorded(workers: Workers, tmp_path: Path) -> None:
    plan, run = recorded(workers, tmp_path, 2, "1f1b")
    assert run is not None
    assert (run.ranks, run.processes) == (2, 2)
    assert comparison_of(plan, run).step.measured_ns > 0


def test_clocks_of_ranks_are_aligned(workers: Workers, tmp_path: Path) -> None:
    """Rank 1 is a second ahead, and gains 2 %: 4 ms in the 0.2 s between the steps."""
    plan, run = workers.run(
        2, jobs.recorded_with_skewed_clock, 2, 10**9, 0.02, folder=str(tmp_path)
    )[0]
    assert isinstance(plan, Plan)
    error = run.clock_error_ns + 10**6
    for step in run.steps:
        actions = by_action(step)
        for microbatch in range(plan.microbatches):
            sent = actions[Action(0, Kind.SEND_FORWARD, microbatch)]
            read = actions[Action(1, Kind.FORWARD, microbatch)]
            assert read.ready_ns >= sent.start_ns - error
        assert step.ranks[1].start_ns < step.ranks[0].end_ns
        assert step.ns < 10**9


def test_what_fails_is_not_recorded(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, jobs.failed, 2, folder=str(tmp_path)) == [(0, 1), (0, 0)]
