"""A GPT-2 with 30 % less memory than it needs: does each of four ranks hold what its plan says, and train as before?

Plans by the command line, first without recompute, then with --recompute auto and a budget of 70 % of what the largest
rank needed, both with costs measured here; then four gloo ranks of one thread each run both plans. Prints what each
rank holds by the allocator's own events beside plan and budget, whether all gradients are those of the plan without
recompute, bit for bit, and the step's time beside the predicted one; writes benchmarks/results/recompute_gpt2.json.

    python -m benchmarks.recompute_gpt2 [TARGET]         (default benchmarks/models.py:gpt2)
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

from benchmarks.memory_prediction import HOLDING_SECONDS, highest, resident
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import Target, load_target
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import read
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "recompute_gpt2.json"
DEFAULT = str(Path(__file__).parent / "models.py") + ":gpt2"
RANKS, MICROBATCHES, SHARE = 4, 8, 70  # of the budget, in %
STEPS = 5


@dataclass(frozen=True)
class Outcome:
    """What a rank did: bytes at its peak, a digest of each gradient, and when each step began and ended."""

    held: int
    gradients: dict[str, str]
    moments: list[tuple[int, int]]


def run(target_name: str, path: str) -> Outcome:
    """On one rank: the plan in this file."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)  # every rank and both plans begin with the same model
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
    held = before + highest(lambda: _steps(pipeline, target))
    gradients = {
        name: _digest(p.grad) for name, p in pipeline.named_parameters() if p.grad is not None
    }
    moments = []
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter_ns()
        _step(pipeline, target)
        moments.append((began, time.perf_counter_ns()))
    return Outcome(held, gradients, moments)


def _steps(pipeline: Pipeline, target: Target) -> None:
    """Two, of which the first makes receive buffers."""
    for _ in range(2):
        _step(pipeline, target)
        time.sleep(HOLDING_SECONDS)


def _step(pipeline: Pipeline, target: Target) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(target.call, target.targets)


def _digest(gradient: torch.Tensor) -> str:
    gradient = gradient + 0.0  # zeros are equal whatever their sign
    return hashlib.sha256(gradient.contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Prints and writes the table."""
    target = sys.argv[1] if sys.argv[1:] else DEFAULT
    with tempfile.TemporaryDirectory() as folder:
        plain = _planned(target, Path(folder) / "plain.json")
        needed = max(rank.total.bound for rank in plain.prediction.memory)
        budget = needed * SHARE // 100
        fitting = _planned(
            target, Path(folder) / "fitting.json", "--recompute", "auto", "--memory", str(budget)
        )
        print(f"{target}: {needed:,} bytes needed without recompute, budget {budget:,}")
        workers = Workers(RANKS)
        try:
            names = ("plain", "fitting")
            found = [
                workers.run(RANKS, run, target, f"{folder}/{name}.json", folder=folder)
                for name in names
            ]
        finally:
            workers.close()
    rows = [*_rows("none", plain, found[0], None), *_rows("auto", fitting, found[1], budget)]
    plain_gradients, gradients = map(_gradients, found)
    unequal = [name for name, digests in plain_gradients.items() if digests != gradients[name]]
    print(
        f"gradients of both plans equal bit for bit: {'all' if not unequal else 'all but ' + ', '.join(unequal)}"
    )
    steps = [
        _say_step(*case) for case in zip(("none", "auto"), (plain, fitting), found, strict=True)
    ]
    result = {
        "torch": torch.__version__,
        "target": target.rpartition(":")[2],
        "ranks": RANKS,
        "budget": budget,
    }
    result |= {"rows": rows, "unequal_gradients": unequal, "steps": steps}
    if not sys.argv[1:]:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _planned(target: str, path: Path, *options: str) -> Plan:
    """What `pipecompile plan` writes."""
    words = [
        "plan",
        target,
        "-k",
        str(RANKS),
        "--microbatches",
        str(MICROBATCHES),
        "-o",
        str(path),
        *options,
    ]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pipecompile", *words], check=True, stdout=subprocess.DEVNULL
    )
    print(
        f"pipecompile {' '.join(words[:6])} {' '.join(options)}: {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return read(path, Plan)


def _rows(
    policy: str, plan: Plan, found: list[Outcome], budget: int | None
) -> list[dict[str, Any]]:
    header = ("recompute", "rank", "regions", "expected", "measured", "error", "bound")
    print("\n{:9} {:>4} {:>7} {:>12} {:>12} {:>7} {:>12} in budget".format(*header))
    rows = []
    for rank, (memory, outcome) in enumerate(zip(plan.prediction.memory, found, strict=True)):
        regions, measured = len(plan.regions.get(rank, ())), outcome.held
        expected, bound = memory.total.expected, memory.total.bound
        fits = "" if budget is None else "yes" if measured <= budget else "NO"
        error = expected / measured - 1
        print(
            f"{policy:9} {rank:4} {regions:7} {expected:12,} {measured:12,} {error:+7.2%} {bound:12,} {fits}"
        )
        row = {
            "recompute": policy,
            "rank": rank,
            "regions": regions,
            "expected": expected,
            "measured": measured,
        }
        rows.append({**row, "bound": bound})
    return rows


def _gradients(found: list[Outcome]) -> dict[str, set[str]]:
    """By parameter the digests of its gradient on the ranks that hold it."""
    names = {name for outcome in found for name in outcome.gradients}
    return {name: {o.gradients[name] for o in found if name in o.gradients} for name in names}


def _say_step(policy: str, plan: Plan, found: list[Outcome]) -> dict[str, Any]:
    """A step lasts from its first beginning to its last end: the ranks of one machine share a clock."""
    steps = zip(*(outcome.moments for outcome in found), strict=True)
    measured = statistics.median(
        max(end for _, end in step) - min(began for began, _ in step) for step in steps
    )
    again = sum(stage.recompute_ns for stage in plan.stages) / sum(
        stage.forward_ns for stage in plan.stages
    )
    print(
        f"recompute {policy}: step predicted {plan.prediction.step_ns / 1e6:.1f} ms, measured {measured / 1e6:.1f} ms; "
        f"{again:.1%} of the forwards are computed again"
    )
    return {
        "recompute": policy,
        "predicted_ns": plan.prediction.step_ns,
        "measured_ns": measured,
        "again": round(again, 4),
    }


if __name__ == "__main__":
    main()
