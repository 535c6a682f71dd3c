"""How much longer does a step take when it is recorded?

    python -m benchmarks.recording

Steps of one pipeline are taken in pairs within one block, with the recorder and without: which of
the two comes first alternates, so that both see the same machine, and ranks begin each together.
The figures are the median ratios of a pair, of wall time and of the CPU time of the thread that
steps, with a 95 % interval of the second one: other work of the machine disturbs it less. Beside
them stands what the recorder's own calls take in a loop, where all that they need is in the caches,
and what entering and leaving a block takes, which is not part of a step. One process runs four
stages in turns; two gloo ranks run two.

Prints a table; writes results/recording.json.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.command_line import no_arguments
from pipecompile.api.compilation import pipecompile
from pipecompile.ir.schedule import Action
from pipecompile.runtime.action_recorder import ActionRecorder
from pipecompile.training.pipeline import Pipeline
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "recording.json"
LIMIT = 0.01
WIDTHS = (32, 64, 192)
WARM_UPS, PAIRS, CALLS, BLOCKS = 5, 200, 1000, 9
MICROBATCHES, ROWS = 8, 64


Times = tuple[int, int]
"""Nanoseconds of wall time and of CPU time."""


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    print(f"{'runs on':12} {'width':>5} {'actions':>7} {'step':>8} {'wall':>7} {'CPU':>7}", end=" ")
    print(f"{'of 95 %':>16} {'calls':>6} {'block':>8}")
    rows = [_printed(measured("one process", 4, width)) for width in WIDTHS]
    workers = Workers(2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for width in WIDTHS:
                results = workers.run(2, measured, "2 ranks", 2, width, folder=folder)
                rows.append(_printed(max(results, key=lambda row: row["cpu_ratio"])))
        finally:
            workers.close()
    RESULT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def measured(runs_on: str, k: int, width: int) -> dict[str, Any]:
    """Return the row of one pipeline, on this rank."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)
    ]
    batch = torch.randn(ROWS, 8, width)
    pipeline = pipecompile(
        nn.Sequential(*layers),
        batch,
        k=k,
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        sample_target=batch,
        costs="flops",
        self_check=False,
    )
    plain, recorded = _alternating(pipeline, batch)
    wall, cpu = (
        sorted(after[clock] / before[clock] for before, after in zip(plain, recorded, strict=True))
        for clock in range(2)
    )
    actions = _actions_here(pipeline)
    wall_ns, cpu_ns = map(statistics.median, zip(*plain, strict=True))
    low, high = _interval(cpu)
    return {
        "runs_on": runs_on,
        "width": width,
        "actions": len(actions),
        "step_ms": round(wall_ns / 1e6, 2),
        "step_cpu_ms": round(cpu_ns / 1e6, 2),
        "wall_ratio": round(statistics.median(wall), 4),
        "cpu_ratio": round(statistics.median(cpu), 4),
        "cpu_interval": [round(low, 4), round(high, 4)],
        "calls_over_cpu": round(_calls_ns(actions) / cpu_ns, 5),
        "block_ms": round(_block_ns(pipeline) / 1e6, 2),
    }


def _alternating(
    pipeline: Pipeline, batch: torch.Tensor
) -> tuple[Sequence[Times], Sequence[Times]]:
    """Return the times of plain steps and of recorded ones, which are taken in turns."""
    plain, recorded = list[Times](), list[Times]()
    with pipeline.record():
        recorders = list(pipeline._recorders)
        for pair in range(WARM_UPS + PAIRS):
            for is_recorded in (False, True) if pair % 2 else (True, False):
                pipeline._recorders[:] = recorders if is_recorded else []
                times = _step_times(pipeline, batch)
                if pair >= WARM_UPS:
                    (recorded if is_recorded else plain).append(times)
        pipeline._recorders[:] = recorders
    return plain, recorded


def _step_times(pipeline: Pipeline, batch: torch.Tensor) -> Times:
    """Return the times of a step that all ranks begin together."""
    pipeline.zero_grad()
    if dist.is_initialized():
        dist.barrier()
    return _timed(lambda: pipeline.step(batch, batch))


def _block_ns(pipeline: Pipeline) -> float:
    """Return what entering and leaving a block takes."""

    def block() -> None:
        with pipeline.record():
            pass

    return statistics.median(_timed(block)[0] for _ in range(BLOCKS))


def _timed(function: Callable[[], object]) -> Times:
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    function()
    return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu


def _actions_here(pipeline: Pipeline) -> list[Action]:
    """Return what this process performs in a step."""
    schedule, share = pipeline.plan.schedule, pipeline._share
    if share.is_distributed:
        return list(schedule.rows[share.place.rank])
    return [action for row in schedule.compute for action in row]


def _calls_ns(actions: Sequence[Action]) -> float:
    """Return what the recorder's calls for a step take, without the step."""
    times = []
    for _ in range(CALLS):
        recorder = ActionRecorder(torch.device("cpu"))
        start = time.perf_counter_ns()
        recorder.begin_step()
        for action in actions:
            recorder.begin(action)
            recorder.ready(action)
            recorder.end(action)
        recorder.end_step(0, MICROBATCHES, list)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return where the median of what these are samples of lies, with 95 % confidence.

    The number of samples below the median is binomial: n / 2 with a deviation of √n / 2.
    """
    half = 0.98 * math.sqrt(len(ordered))
    middle = len(ordered) / 2
    return ordered[math.floor(middle - half)], ordered[math.ceil(middle + half)]


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["cpu_interval"]
    interval = f"{low:.4f} – {high:.4f}"
    verdict = "" if row["cpu_ratio"] < 1 + LIMIT else f"  over {LIMIT:.0%}"
    print(
        f"{row['runs_on']:12} {row['width']:5} {row['actions']:7} {row['step_ms']:6.1f}ms "
        f"{row['wall_ratio']:7.4f} {row['cpu_ratio']:7.4f} {interval:>16} "
        f"{row['calls_over_cpu']:6.2%} {row['block_ms']:6.1f}ms{verdict}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
