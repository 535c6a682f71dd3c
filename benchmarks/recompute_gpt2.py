"""Does a GPT-2 train in 30 % less memory, with each rank holding what its plan says?

    python -m benchmarks.recompute_gpt2 [TARGET]         (default benchmarks/models.py:gpt2)

`pipecompile plan` makes two plans with costs measured here: one without recompute, and one with
`--recompute auto` and a cap of 70 % of what the fullest rank of the first one needs. Then four
gloo ranks of one thread each run both plans.

Prints what each rank holds, by the allocator's own events, beside plan and cap; whether the
gradients under both plans are equal bit for bit; and the time of a step beside the predicted one.
Writes results/recompute_gpt2.json, unless there is a TARGET.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.command_line import parser_of
from benchmarks.memory_prediction import GLOO_SECONDS, peak_allocation, resident
from pipecompile.api.compilation import pipecompile
from pipecompile.api.target import load_target
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from pipecompile.training.pipeline import Pipeline
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "recompute_gpt2.json"
DEFAULT = str(Path(__file__).parent / "models.py") + ":gpt2"
RANKS, MICROBATCHES = 4, 8
CAP_PERCENT = 70  # of the bound of the fullest rank without recompute
STEPS = 5


@dataclass(frozen=True)
class RankRun:
    """A run on one rank: its peak, a digest of each gradient, when each step began and ended."""

    peak_bytes: int
    gradients: dict[str, str]
    moments: list[tuple[int, int]]


def run(target_name: str, path: str) -> RankRun:
    """On one rank: run the plan in the file `path`."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)  # Every rank and both plans begin with the same model.
    target = load_target(target_name)
    pipeline = pipecompile(
        target.model,
        target.call,
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        plan=path,
        self_check=False,
    )
    before = resident(pipeline, target, dist.get_rank())
    peak = before + peak_allocation(lambda: _steps(pipeline, target))
    gradients = {
        name: _digest(p.grad) for name, p in pipeline.named_parameters() if p.grad is not None
    }
    moments = []
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter_ns()
        _step(pipeline, target)
        moments.append((began, time.perf_counter_ns()))
    return RankRun(peak, gradients, moments)


def _steps(pipeline: Pipeline, target: Target) -> None:
    """Run two steps: what the first one leaves would show in the second."""
    for _ in range(2):
        _step(pipeline, target)
        time.sleep(GLOO_SECONDS)


def _step(pipeline: Pipeline, target: Target) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(target.call, target.targets)


def _digest(gradient: torch.Tensor) -> str:
    gradient = gradient + 0.0  # So that −0 and 0 have the same digest.
    return hashlib.sha256(gradient.contiguous().numpy().tobytes()).hexdigest()


def main(target: str) -> None:
    """Print the table; write it if `target` is the default one."""
    with tempfile.TemporaryDirectory() as folder:
        plain = _planned(target, Path(folder) / "plain.json")
        needed = max(rank.total.bound for rank in plain.prediction.memory)
        cap = needed * CAP_PERCENT // 100
        capped = _planned(
            target, Path(folder) / "capped.json", "--recompute", "auto", "--memory", str(cap)
        )
        print(f"{target}: {needed:,} bytes needed without recompute, cap {cap:,}")
        workers = Workers(RANKS)
        try:
            names = ("plain", "capped")
            runs = [
                workers.run(RANKS, run, target, f"{folder}/{name}.json", folder=folder)
                for name in names
            ]
        finally:
            workers.close()
    rows = [*_rows("none", plain, runs[0], None), *_rows("auto", capped, runs[1], cap)]
    plain_gradients, gradients = map(_gradients, runs)
    unequal = [name for name, digests in plain_gradients.items() if digests != gradients[name]]
    equal = "all" if not unequal else f"all except {', '.join(unequal)}"
    print(f"gradients of both plans equal bit for bit: {equal}")
    steps = [_step_row("none", plain, runs[0]), _step_row("auto", capped, runs[1])]
    result = {
        "torch": torch.__version__,
        "target": target.rpartition(":")[2],
        "ranks": RANKS,
        "cap": cap,
    }
    result |= {"rows": rows, "unequal_gradients": unequal, "steps": steps}
    if target == DEFAULT:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _planned(target: str, path: Path, *options: str) -> Plan:
    """Return the plan that `pipecompile plan` writes to `path`."""
    words = ["plan", target, "-k", str(RANKS), "--microbatches", str(MICROBATCHES)]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pipecompile", *words, "-o", str(path), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began
    print(f"pipecompile {' '.join([*words, *options])}: {seconds:.0f} s", flush=True)
    return read(path, Plan)


def _rows(policy: str, plan: Plan, runs: list[RankRun], cap: int | None) -> list[dict[str, Any]]:
    header = ("recompute", "rank", "regions", "expected", "measured", "error", "bound")
    print("\n{:9} {:>4} {:>7} {:>12} {:>12} {:>7} {:>12} in cap".format(*header))
    rows = []
    for rank, (memory, run_of_rank) in enumerate(zip(plan.prediction.memory, runs, strict=True)):
        regions, measured = len(plan.regions.get(rank, ())), run_of_rank.peak_bytes
        expected, bound = memory.total.expected, memory.total.bound
        fits = "" if cap is None else "yes" if measured <= cap else "NO"
        error = expected / measured - 1
        print(f"{policy:9} {rank:4} {regions:7} {expected:12,} {measured:12,}", end=" ")
        print(f"{error:+7.2%} {bound:12,} {fits}")
        row = {
            "recompute": policy,
            "rank": rank,
            "regions": regions,
            "expected": expected,
            "measured": measured,
        }
        rows.append({**row, "bound": bound})
    return rows


def _gradients(runs: list[RankRun]) -> dict[str, set[str]]:
    """Return for each parameter the digests of its gradient on the ranks that hold it."""
    digests: dict[str, set[str]] = {}
    for run_of_rank in runs:
        for name, digest in run_of_rank.gradients.items():
            digests.setdefault(name, set()).add(digest)
    return digests


def _step_row(policy: str, plan: Plan, runs: list[RankRun]) -> dict[str, Any]:
    """Print and return how long a step takes, predicted and measured."""
    # The ranks of one machine share a clock, so a step lasts from the first begin to the last end.
    steps = zip(*(run_of_rank.moments for run_of_rank in runs), strict=True)
    measured = statistics.median(
        max(end for _, end in step) - min(began for began, _ in step) for step in steps
    )
    recompute_ns = sum(stage.recompute_ns for stage in plan.stages)
    share = recompute_ns / sum(stage.forward_ns for stage in plan.stages)
    print(
        f"recompute {policy}: step predicted {plan.prediction.step_ns / 1e6:.1f} ms, "
        f"measured {measured / 1e6:.1f} ms; {share:.1%} of the forwards are recomputed"
    )
    return {
        "recompute": policy,
        "predicted_ns": plan.prediction.step_ns,
        "measured_ns": measured,
        "recompute_share": round(share, 4),
    }


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("target", nargs="?", metavar="TARGET", default=DEFAULT)
    main(parser.parse_args().target)
