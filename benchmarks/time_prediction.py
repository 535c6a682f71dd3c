"""Does a step take as long as its plan predicts?

    python -m benchmarks.time_prediction

In one process the stages run one after another, so a step should take the sum of what all ranks do.
The unsplit model runs the same microbatches in the same process, in turns with the pipeline, which
shows what the pipeline adds. Two gloo ranks of one thread each plan with the links that they probe,
and their step should take as long as the simulated one.

Prints a table; writes results/time_prediction.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command_line import no_arguments
from benchmarks.models import MODELS
from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.runtime.probe import measure_links
from pipecompile.schedule.simulator import simulate_plan
from pipecompile.training.pipeline import Pipeline
from tests.distributed.workers import Workers

MODEL_NAMES = ("mlp", "gpt2", "bert", "t5", "llama", "vit", "resnet", "unet")
SCHEDULES = ("1f1b", "gpipe")
RESULT = Path(__file__).parent / "results" / "time_prediction.json"
MICROBATCHES = 4
WARM_UPS, REPEATS = 2, 15
ONE_PROCESS = "one process"


# glibc's settings that keep freed memory with the process. Otherwise the system may take it back,
# depending on all that the process did before, and has to fill it with zeros when it is allocated
# next: one step would take up to twice as long as another.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    print(f"{'model':10} {'nodes':>5} {'runs on':16} {'predicted':>10}", end=" ")
    print(f"{'measured':>10} {'error':>7} over unsplit")
    with _two_ranks() as ranks:
        rows = [row for name in MODEL_NAMES for row in (one_process(name), *ranks(name))]
    summary = {
        runs_on: _summary(runs_on, rows)
        for runs_on in dict.fromkeys(row["runs_on"] for row in rows)
    }
    result = {
        "torch": torch.__version__,
        "device": "cpu",
        "threads_per_rank": 1,
        "summary": summary,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _summary(runs_on: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = {
        row["model"]: abs(row["predicted_over_measured"] - 1)
        for row in rows
        if row["runs_on"] == runs_on
    }
    worst = max(errors, key=errors.__getitem__)
    median = statistics.median(errors.values())
    print(f"{runs_on}: median error {median:.1%}, worst {errors[worst]:.1%} ({worst})")
    return {
        "median_error": round(median, 3),
        "worst_error": round(errors[worst], 3),
        "worst_model": worst,
    }


def one_process(name: str) -> dict[str, Any]:
    """Return the row of one process: k = 2, 1F1B, in turns with the unsplit model."""
    target = _target(name)
    twin = Target(copy.deepcopy(target.model), target.call, target.loss_fn, target.targets)
    pipeline = _pipeline(target, "1f1b")
    reference = reference_for(twin, pipeline.plan)
    own = _median_ns(lambda: _step(pipeline, target))
    turns = _alternating(
        lambda: _step(pipeline, target), lambda: reference.step(twin, MICROBATCHES)
    )
    return _row(name, ONE_PROCESS, pipeline.plan, sum_of_ranks_ns(pipeline.plan), own, turns)


def sum_of_ranks_ns(plan: Plan) -> int:
    """Return how long the actions of all ranks in a step take, one after another."""
    timeline = simulate_plan(plan)
    return sum(timeline.busy_ns) + sum(stage.per_step_ns for stage in plan.stages)


@contextmanager
def _two_ranks() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    workers = Workers(2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield lambda name: [
                _row_of_ranks(workers.run(2, two_ranks, name, s, folder=folder), name, s)
                for s in SCHEDULES
            ]
        finally:
            workers.close()


def two_ranks(name: str, schedule: str) -> tuple[Plan, list[tuple[int, int]]]:
    """On a rank: return its plan, and when each step began and ended there."""
    target = _target(name)
    links = measure_links()
    pipeline = _pipeline(target, schedule, links=links)
    moments = []
    for _ in range(WARM_UPS + REPEATS):
        dist.barrier()
        began = time.perf_counter_ns()
        _step(pipeline, target)
        moments.append((began, time.perf_counter_ns()))
    return pipeline.plan, moments[WARM_UPS:]


def _row_of_ranks(
    results: list[tuple[Plan, list[tuple[int, int]]]], name: str, schedule: str
) -> dict[str, Any]:
    """Return the row of a run on two ranks."""
    # The ranks of one machine share a clock, so a step lasts from the first begin to the last end.
    plan = results[0][0]
    steps = zip(*(moments for _, moments in results), strict=True)
    times = [max(end for _, end in step) - min(began for began, _ in step) for step in steps]
    return _row(
        name, f"2 ranks, {schedule}", plan, plan.prediction.step_ns, statistics.median(times), None
    )


def _row(
    name: str,
    runs_on: str,
    plan: Plan,
    predicted: float,
    own: float,
    turns: tuple[float, float] | None,
) -> dict[str, Any]:
    nodes = sum(len(stage.nodes) for stage in plan.stages)
    ratio = None if turns is None else turns[0] / turns[1]
    over_unsplit = "" if ratio is None else format(ratio, "8.2f")
    print(f"{name:10} {nodes:5} {runs_on:16} {predicted / 1e6:8.1f}ms", end=" ")
    print(f"{own / 1e6:8.1f}ms {predicted / own - 1:+7.1%} {over_unsplit}", flush=True)
    row = {
        "model": name,
        "nodes": nodes,
        "runs_on": runs_on,
        "predicted_over_measured": round(predicted / own, 3),
    }
    row |= {"predicted_ms": round(predicted / 1e6, 1), "measured_ms": round(own / 1e6, 1)}
    return row if ratio is None else {**row, "pipelined_over_unsplit": round(ratio, 3)}


def _target(name: str) -> Target:
    return Target.of(MODELS[name](), name)


def _pipeline(target: Target, schedule: str, **options: Any) -> Pipeline:
    return pipecompile(
        target.model,
        target.call,
        k=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        costs="measured",
        **options,
    )


def _step(pipeline: Pipeline, target: Target) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(target.call, target.targets)


def _median_ns(function: Callable[[], object]) -> float:
    times = []
    for _ in range(WARM_UPS + REPEATS):
        started = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times[WARM_UPS:])


def _alternating(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the median ns of both functions, run in turns so that both see the same machine."""
    times: tuple[list[int], list[int]] = ([], [])
    for repeat in range(WARM_UPS + REPEATS):
        for function, row in zip((first, second), times, strict=True):
            started = time.perf_counter_ns()
            function()
            if repeat >= WARM_UPS:
                row.append(time.perf_counter_ns() - started)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    no_arguments(__doc__)
    # glibc reads these settings when a process begins, so this one begins anew.
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.time_prediction"],
            {**os.environ, **KEEP_MEMORY},
        )
    main()
