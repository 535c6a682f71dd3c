"""Is what `k` alone chooses as much shorter in a run as its plan predicts?

    python -m benchmarks.chosen_step [--ranks N]

Gloo ranks of one thread each, four unless given, plan with measured costs and the links that they
probe: once with k microbatches under 1f1b, as by hand, and once with all that is left open chosen.
They step in turns, so that both see the same machine. The ratio of the two medians should be that
of the plans.

More ranks than cores would share them, and fill each other's bubbles. So each computation is then
followed by a wait of several times its CPU time, and ranks seldom meet on a core: as if each had a
device of its own that is so many times slower. Times are divided by that again.

Prints a table; writes results/chosen_step.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.command_line import parser_of
from benchmarks.models import MODELS
from benchmarks.time_prediction import KEEP_MEMORY
from pipecompile.api.compilation import pipecompile
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, Action
from pipecompile.runtime.probe import measure_links
from pipecompile.runtime.rank_step import RankStep
from pipecompile.training.pipeline import Pipeline
from tests.distributed.workers import Workers

MODEL_NAMES = ("mlp", "gpt2", "vit")
RESULT = Path(__file__).parent / "results" / "chosen_step.json"
WARM_UPS, REPEATS = 2, 15

Moment = tuple[int, int]


def main(ranks: int) -> None:
    """Print and write the table."""
    print(f"{'model':6} {'by hand':>17} {'chosen':>17} {'predicted':>9} {'measured':>8}  setting")
    workers, cores = Workers(ranks), os.cpu_count() or 1
    slower = 1 if ranks <= cores else 2 * ranks // cores
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = [
                _row(name, workers.run(ranks, steps, name, slower, folder=folder), slower)
                for name in MODEL_NAMES
            ]
        finally:
            workers.close()
    result = {"ranks": ranks, "times_slower": slower, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def steps(name: str, slower: int) -> tuple[list[Plan], list[list[Moment]]]:
    """On a rank: return both plans, and of each when its steps began and ended there."""
    links, ranks = measure_links(), dist.get_world_size()
    pipelines = []
    for options in ({"microbatches": ranks}, {}):
        target = Target.of(MODELS[name](), name)
        pipelines.append((_pipeline(target, links=links, **options), target))
    moments: list[list[Moment]] = [[] for _ in pipelines]
    with _slowed_down(slower):
        for _ in range(WARM_UPS + REPEATS):
            for row, (pipeline, target) in zip(moments, pipelines, strict=True):
                dist.barrier()
                began = time.perf_counter_ns()
                pipeline.zero_grad()
                pipeline.step(target.call, target.targets)
                row.append((began, time.perf_counter_ns()))
    plans = [copy.copy(pipeline.plan) for pipeline, _ in pipelines]
    return plans, [row[WARM_UPS:] for row in moments]


@contextmanager
def _slowed_down(times: int) -> Iterator[None]:
    """Let each computation of this rank take so many times its CPU time in the block."""
    perform = RankStep._perform

    def slowed(rank_step: RankStep, action: Action) -> None:
        began = time.thread_time()
        perform(rank_step, action)
        if action.kind in COMPUTE and times > 1:
            time.sleep((times - 1) * (time.thread_time() - began))

    with patch.object(RankStep, "_perform", slowed):
        yield


def _pipeline(target: Target, **options: Any) -> Pipeline:
    return pipecompile(
        target.model,
        target.call,
        k=dist.get_world_size(),
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        costs="measured",
        **options,
    )


def _row(
    name: str, results: list[tuple[list[Plan], list[list[Moment]]]], slower: int
) -> dict[str, Any]:
    plans = results[0][0]
    measured = [
        _median_ns([moments[place] for _, moments in results]) / slower for place in range(2)
    ]
    predicted = [plan.prediction.step_ns for plan in plans]
    ratios = predicted[1] / predicted[0], measured[1] / measured[0]
    setting = f"{plans[1].microbatches} microbatches, {plans[1].schedule.name}"
    by_hand, chosen = (
        f"{plan / 1e6:5.1f} / {run / 1e6:5.1f} ms"
        for plan, run in zip(predicted, measured, strict=True)
    )
    print(f"{name:6} {by_hand:>17} {chosen:>17} {ratios[0]:9.3f} {ratios[1]:8.3f}  {setting}")
    return {
        "model": name,
        "setting": setting,
        "predicted_ms": [round(each / 1e6, 1) for each in predicted],
        "measured_ms": [round(each / 1e6, 1) for each in measured],
        "predicted_ratio": round(ratios[0], 3),
        "measured_ratio": round(ratios[1], 3),
    }


def _median_ns(ranks: list[list[Moment]]) -> float:
    """Return the median time of a step, from its first begin on a rank to its last end."""
    return statistics.median(
        max(end for _, end in step) - min(began for began, _ in step)
        for step in zip(*ranks, strict=True)
    )


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    # glibc reads these settings when a process begins, so this one begins anew.
    if not KEEP_MEMORY.items() <= os.environ.items():
        module = [sys.executable, "-m", "benchmarks.chosen_step", "--ranks", str(arguments.ranks)]
        os.execve(sys.executable, module, {**os.environ, **KEEP_MEMORY})
    main(arguments.ranks)
