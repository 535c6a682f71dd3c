"""What workers do in tests of recorded runs: each function runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from pipecompile.ir.plan import Plan
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.runtime import action_recorder, clock_alignment
from pipecompile.runtime.rank_step import RankStep
from pipecompile.training.pipeline import Pipeline
from tests.delayed_gradients import OPTIMIZERS
from tests.distributed.training_jobs import MICROBATCH, run_of
from tests.training.test_continuous_training import batches_of

Recorded = tuple[Plan, RecordedRun | None]


def recorded(ranks: int, replicas: int, schedule: str, folder: str) -> Recorded:
    """Three recorded steps, of which the second sleeps before a forward of the first rank; another
    one before and after, which nobody records. The run is saved by every rank alike.
    """
    run = run_of(ranks, replicas, schedule=schedule)
    run.step()
    with run.pipeline.record() as recording:
        run.step()
        with _sleeping(0.3, stage=0, microbatch=2):
            run.step()
        run.step(accumulate=True)
    run.step()
    recording.save(Path(folder) / "run.json")
    return run.pipeline.plan, recording.run


def recorded_in_flight(
    schedule: str, microbatches: int, on: tuple[int, ...]
) -> tuple[Plan, RecordedRun | None, bool]:
    """A block amid a run without end, with a drain in it, and whether the run ended as one does
    that nobody records; the stages are `on` so many ranks each.
    """
    batches = batches_of(MICROBATCH * microbatches, 12)
    options: Any = {"schedule": schedule, "microbatches": microbatches}
    if max(on) > 1:
        options["stage_replicas"] = on
    plain, recorded = (run_of(sum(on), 1, **options).pipeline for _ in range(2))
    wanted = list(plain.train(batches, OPTIMIZERS["momentum"]))
    run = recorded.train(batches, OPTIMIZERS["momentum"])
    losses = [next(run)]
    with recorded.record() as recording:
        losses += [next(run) for _ in range(4)]
        recorded.drain()
        losses += [next(run) for _ in range(6)]
    losses += run
    same_weights = all(map(torch.equal, plain.parameters(), recorded.parameters()))
    return recorded.plan, recording.run, losses == wanted and same_weights


def recorded_with_skewed_clock(ranks: int, skew_ns: int, drift: float) -> Recorded:
    """A recorded step; the clock of rank 1 is ahead, and runs faster."""
    run = run_of(ranks, 1, schedule="1f1b")
    run.step()
    clock, start = time.perf_counter_ns, time.perf_counter_ns()

    def skewed() -> int:
        now = clock()
        return now + skew_ns + round((now - start) * drift)

    with ExitStack() as patches:
        if dist.get_rank() == 1:
            patches.enter_context(patch.object(time, "perf_counter_ns", skewed))
            for module in (action_recorder, clock_alignment):
                patches.enter_context(patch.object(module, "perf_counter_ns", skewed))
        with run.pipeline.record() as recording:
            run.step()
            time.sleep(0.2)
            run.step()
    return run.pipeline.plan, recording.run


def failed(ranks: int) -> tuple[int, int]:
    """How many recorders are left after a block that failed, and how many steps a run has in which
    a step failed before another one.
    """
    run = run_of(ranks, 1, schedule="1f1b")
    pipeline: Pipeline = run.pipeline
    try:
        with pipeline.record():
            raise KeyError
    except KeyError:
        left = len(pipeline._recorders)
    with pipeline.record() as recording:
        try:
            pipeline.step(run.whole.call.args[0][:, :3], None)  # too few tokens
        except ValueError:
            run.step()
    return left, len(recording.run.steps) if recording.run else 0


@contextmanager
def _sleeping(seconds: float, *, stage: int, microbatch: int) -> Iterator[None]:
    """Let the forward of a microbatch in a stage begin later."""
    forward = RankStep._forward

    def late(rank_step: RankStep, index: int, number: int) -> None:
        if (index, number) == (stage, microbatch):
            time.sleep(seconds)
        forward(rank_step, index, number)

    with patch.object(RankStep, "_forward", late):
        yield
