"""Does a step take what the plan predicts, and what does the pipeline cost over the unsplit model?

One process, one thread: the stages run one after another, so the prediction is the sum of the loads of all ranks. The
unsplit model runs the same microbatches in the same process, alternating with the pipeline, so the ratios hold on a
noisy machine. Prints a table and writes benchmarks/results/step_time.json.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from examples import models
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import Target
from pipecompile.api.verify import reference_for

NAMES = ("sequential", "unet", "gpt2", "bert", "t5", "llama", "resnet50", "gpt2_small")
RESULT = Path(__file__).parent / "results" / "step_time.json"
REPEATS = 5


def main() -> None:
    """Prints and writes the table."""
    torch.set_num_threads(1)
    print(
        f"{'model':12} {'nodes':>6} {'plan s':>7} {'predicted':>10} {'measured':>10} {'error':>7} "
        f"{'unsplit':>10} {'ratio':>6}"
    )
    rows = [measure(name) for name in NAMES]
    errors = [abs(row["predicted_over_measured"] - 1) for row in rows]
    print(f"median error of the prediction: {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    result = {"torch": torch.__version__, "threads": 1, "device": "cpu", "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str) -> dict[str, Any]:
    """One model, k = 4, 1F1B, 4 microbatches."""
    target = Target.of(getattr(models, name)(), name)
    twin = Target(copy.deepcopy(target.model), target.call, target.loss_fn, target.targets)
    started = time.perf_counter()
    pipeline = pipecompile(
        target.model, target.call, k=4, loss_fn=target.loss_fn, sample_target=target.targets, costs="measured"
    )
    planned = time.perf_counter() - started
    reference = reference_for(twin, pipeline.plan)
    predicted = sum(pipeline.plan.prediction.loads_ns) * pipeline.plan.microbatches / 1e9
    own, unsplit = _alternating(
        lambda: _pipelined(pipeline, target), lambda: reference.step(twin, pipeline.plan.microbatches)
    )
    nodes = sum(len(stage.nodes) for stage in pipeline.plan.stages)
    print(
        f"{name:12} {nodes:6} {planned:7.1f} {predicted * 1e3:8.1f}ms {own * 1e3:8.1f}ms {predicted / own - 1:+7.1%} "
        f"{unsplit * 1e3:8.1f}ms {own / unsplit:6.2f}",
        flush=True,
    )
    return {
        "model": name,
        "nodes": nodes,
        "predicted_over_measured": round(predicted / own, 3),
        "pipelined_over_unsplit": round(own / unsplit, 3),
    }


def _pipelined(pipeline: Pipeline, target: Target) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(target.call, target.targets)


def _alternating(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both, run in turns after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS + 1):
        for function, row in zip((first, second), times, strict=True):
            started = time.perf_counter()
            function()
            if repeat:
                row.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
