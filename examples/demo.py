"""GPT-2 small planned and trained as a 4-stage pipeline, beside the unsplit model.

`make demo` runs this file. It writes demo/plan.json, demo/trace.json (open it in ui.perfetto.dev) and
demo/timeline.svg, and exits 1 if a gradient or a loss is not the unsplit model's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from examples.models import gpt2_small
from pipecompile.api.compile import pipecompile
from pipecompile.api.target import Target
from pipecompile.api.verify import Comparison, compare, reference_for
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode, write
from pipecompile.report.svg import timeline_svg
from pipecompile.report.text import summary, timeline_text
from pipecompile.report.trace import trace

FOLDER = Path("demo")
PLAN = FOLDER / "plan.json"
STAGES = RANKS = 4
STEPS = 2
LEARNING_RATE = 0.1


def main() -> int:
    """Plan, train unsplit, train as a pipeline on 4 ranks, compare."""
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # as each rank has: the number of threads changes how sums round
    target = Target.of(gpt2_small(), "gpt2_small")
    print(
        "GPT-2 small, 124M parameters, random weights, 8 × 128 tokens, 4 microbatches\n", flush=True
    )
    plan = make_plan(target)
    print("\ntraining the unsplit model for", STEPS, "steps …", flush=True)
    losses = train_unsplit(target, plan)
    del target
    print("training the pipeline on 4 gloo ranks under torchrun …\n", flush=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        "-m",
        "examples.demo",
    ]
    started = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "PIPECOMPILE_DEMO_RANK": "1"}
    )
    print(f"({time.perf_counter() - started:.0f} s with start-up; unsplit losses {losses})")
    print(f"\nwritten: {PLAN}, {FOLDER / 'trace.json'}, {FOLDER / 'timeline.svg'}")
    return done.returncode


def make_plan(target: Target) -> Plan:
    """Measures the model on this machine and plans it."""
    pipeline = pipecompile(
        target.model, target.call, k=STAGES, loss_fn=target.loss_fn, sample_target=target.targets
    )
    plan, timeline = pipeline.plan, pipeline.simulate()
    write(PLAN, encode(plan))
    write(FOLDER / "trace.json", trace(plan, timeline))
    write(FOLDER / "timeline.svg", timeline_svg(plan, timeline).encode())
    print(summary(plan))
    print(timeline_text(timeline))
    return plan


def train_unsplit(target: Target, plan: Plan) -> list[str]:
    """The reference: its gradients go to one file a step, for the ranks to compare their part with."""
    reference = reference_for(target, plan)
    optimizer = torch.optim.SGD(reference.model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = reference.step(target, plan.microbatches, step=step)
        gradients = {name: p.grad for name, p in reference.model.named_parameters()}
        torch.save({"loss": loss, "gradients": gradients}, _reference_file(step))
        optimizer.step()
        losses.append(f"{loss.item():.6f}")
    return losses


def _reference_file(step: int) -> Path:
    return FOLDER / f"unsplit-step{step}.pt"


def train_rank() -> int:
    """What each rank does under torchrun: run the committed plan, and compare after each step."""
    target = Target.of(gpt2_small(), "gpt2_small")
    pipeline = pipecompile(target.model, target.call, plan=PLAN, loss_fn=target.loss_fn)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE)
    passed = True
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.step(target.call, target.targets)
        unsplit = torch.load(_reference_file(step), mmap=True, weights_only=True)
        found = compare(
            pipeline, (unsplit["loss"].item(), loss), unsplit["gradients"], {}, "unsplit"
        )
        passed = passed and (found.passed if step == 0 else _close(*found.losses))
        if dist.get_rank() == 0:
            print(_line(step, found), flush=True)
        optimizer.step()
    return 0 if passed else 1


def _close(unsplit: float, pipelined: float) -> bool:
    """After an update the models differ by what the sum over ranks rounded differently, and no more."""
    return abs(pipelined - unsplit) <= 1e-5 * abs(unsplit)


def _line(step: int, found: Comparison) -> str:
    equal = sum(difference.equal for difference in found.differences)
    worst = found.worst
    exact = f"{equal} of {len(found.differences)} gradients equal bit for bit"
    largest = (
        f"largest difference {worst.relative:.1e} relative, {worst.name}"
        if not worst.equal
        else "all equal"
    )
    cause = " (tied: summed over ranks)" if worst.name in found.tied and not worst.equal else ""
    return f"step {step}: loss {found.losses[1]:.6f}, unsplit {found.losses[0]:.6f}; {exact}; {largest}{cause}"


if __name__ == "__main__":
    raise SystemExit(train_rank() if "PIPECOMPILE_DEMO_RANK" in os.environ else main())
