"""GPT-2 small planned and trained as a 4-stage pipeline, beside the unsplit model.

`make demo` runs this file. It writes demo/plan.json, demo/trace.json (open it in ui.perfetto.dev)
and demo/timeline.svg, and exits 1 if a gradient or a loss is not the unsplit model's. Everything
else that it writes, the unsplit model's gradients and a cache of its own for measured costs, lies
in a folder that is gone when it ends.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from examples.models import gpt2_small
from pipecompile import Plan, pipecompile
from pipecompile.api.report import picture_of, text_of, trace_of
from pipecompile.api.verification import Comparison, compare, reference_for
from pipecompile.frontend.target import Target
from pipecompile.ir.serialization import encode, write

FOLDER = Path("demo")
PLAN = FOLDER / "plan.json"
STAGES = RANKS = 4
STEPS = 2
LEARNING_RATE = 0.1
SCRATCH = "PIPECOMPILE_DEMO_SCRATCH"  # where ranks find the unsplit model's gradients
WHY_BITS_DIFFER = """\
        No gradient is equal bit for bit any more, and none should be: in step 0 the gradient of the
        tied embedding was summed over two ranks, in another order than in one process, so its last
        bits were rounded differently. The update made these bits part of the weights, and with
        other weights every gradient of the next step differs as little. `pipecompile verify`
        compares a first step, where only tied parameters may differ."""


def main() -> int:
    """Plan, train unsplit, train as a pipeline on 4 ranks, compare."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unsplit-", dir=FOLDER) as folder:
        os.environ["PIPECOMPILE_CACHE"] = str(Path(folder) / "cache")
        return run(Path(folder))


def run(folder: Path) -> int:
    """The demo, with large files in `folder`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # as each rank has: the number of threads changes how sums round
    target = Target.of(gpt2_small(), "gpt2_small")
    print(
        "GPT-2 small, 124M parameters, random weights, 8 × 128 tokens, 4 microbatches\n", flush=True
    )
    plan = plan_model(target)
    print("\ntraining the unsplit model for", STEPS, "steps …", flush=True)
    losses = train_unsplit(target, plan, folder)
    del target
    print("training the pipeline on 4 gloo ranks under torchrun …\n", flush=True)
    started = time.perf_counter()
    returncode = train_on_ranks(folder)
    print(f"({time.perf_counter() - started:.0f} s with start-up; unsplit losses {losses})")
    print(f"\nwritten: {PLAN}, {FOLDER / 'trace.json'}, {FOLDER / 'timeline.svg'}")
    return returncode


def plan_model(target: Target) -> Plan:
    """Measures the model on this machine and plans it."""
    pipeline = pipecompile(
        target.model,
        target.call,
        k=STAGES,
        microbatches=STAGES,
        loss_fn=target.loss_fn,
        sample_target=target.targets,
    )
    plan = pipeline.plan
    write(PLAN, encode(plan))
    write(FOLDER / "trace.json", trace_of(plan))
    write(FOLDER / "timeline.svg", picture_of(plan).encode())
    print(text_of(plan))
    return plan


def train_on_ranks(folder: Path) -> int:
    """Starts this file once for each rank, where `train_rank` runs; returns 0 if all ranks pass."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SCRATCH: str(folder)}
    return subprocess.run([*torchrun, "-m", "examples.demo"], env=environment).returncode


def train_unsplit(target: Target, plan: Plan, folder: Path) -> list[str]:
    """The reference: its gradients go to one file a step, with which ranks compare theirs."""
    reference = reference_for(target, plan)
    optimizer = torch.optim.SGD(reference.model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = reference.step(target, plan.microbatches, step=step)
        gradients = {name: p.grad for name, p in reference.model.named_parameters()}
        torch.save({"loss": loss, "gradients": gradients}, _reference_file(folder, step))
        optimizer.step()
        losses.append(f"{loss.item():.6f}")
    return losses


def _reference_file(folder: Path, step: int) -> Path:
    return folder / f"step{step}.pt"


def train_rank() -> int:
    """What each rank does under torchrun: run the committed plan, and compare after each step."""
    folder = Path(os.environ[SCRATCH])
    target = Target.of(gpt2_small(), "gpt2_small")
    pipeline = pipecompile(target.model, target.call, plan=PLAN, loss_fn=target.loss_fn)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE)
    passed = True
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.step(target.call, target.targets)
        unsplit = torch.load(_reference_file(folder, step), mmap=True, weights_only=True)
        comparison = compare(
            pipeline, (unsplit["loss"].item(), loss), unsplit["gradients"], {}, "unsplit"
        )
        passed = passed and (comparison.passed if step == 0 else _is_close(*comparison.losses))
        if dist.get_rank() == 0:
            print(_line(step, comparison), flush=True)
            if step > 0:
                print(WHY_BITS_DIFFER, flush=True)
        optimizer.step()
    return 0 if passed else 1


def _is_close(unsplit: float, pipelined: float) -> bool:
    """Whether the losses differ by no more than the sums over ranks that were rounded differently
    explain.
    """
    return abs(pipelined - unsplit) <= 1e-5 * abs(unsplit)


def _line(step: int, comparison: Comparison) -> str:
    equal = sum(difference.equal for difference in comparison.differences)
    worst = comparison.worst
    equal_text = f"{equal} of {len(comparison.differences)} gradients equal bit for bit"
    largest = (
        f"largest difference {worst.relative:.1e} relative, {worst.name}"
        if not worst.equal
        else "all equal"
    )
    cause = (
        " (tied: summed over ranks)" if worst.name in comparison.tied and not worst.equal else ""
    )
    losses = f"loss {comparison.losses[1]:.6f}, unsplit {comparison.losses[0]:.6f}"
    return f"step {step}: {losses}; {equal_text}; {largest}{cause}"


if __name__ == "__main__":
    raise SystemExit(train_rank() if SCRATCH in os.environ else main())
