"""Does a run that is killed and goes on with another cut learn what an unsplit model learns?

    python -m examples.train [--steps 200] [--figure docs/images/train.svg]

A small GPT-2 is trained on the project's own pages, in four runs one after another:

1. The unsplit model in a plain PyTorch loop, with nothing of pipecompile in it.
2. The same loop, but gradients of microbatches are summed in the reverse order. How far its losses
   are from those of the first run is what rounding alone does.
3. torchrun starts 4 gloo ranks, 2 replicas of a pipeline of 2 stages. Halfway all ranks save a
   checkpoint. Five steps later rank 2 is killed with SIGKILL, and with it the job.
4. torchrun starts 4 gloo ranks, one pipeline of 4 stages, which goes on from the checkpoint.

All train in bfloat16 by autocast, clip gradients, and follow a warm-up and a cosine. It prints the
losses, draws them, and exits 1 if one of a pipeline is farther than `TOLERANCE` from that of the
plain loop. Logs and checkpoint lie in a folder that is gone when it ends; only the figure stays.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from examples.corpus import ROOT, corpus
from examples.loss_figure import Curve, loss_figure
from examples.pretrain import (
    BATCH,
    LARGEST_NORM,
    LAYERS,
    LENGTH,
    MICROBATCHES,
    WIDTH,
    Losses,
    gpt2,
    train_unsplit,
)

RANKS, KILLED = 4, 2
TOLERANCE = 0.01


def main() -> int:
    """Train, compare and draw; return 0 if the losses are those of the plain loop."""
    parser = argparse.ArgumentParser(prog="python -m examples.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="12 or more; 200 without it")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "images" / "train.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipecompile-train-") as folder:
        return run(options.steps, options.figure, Path(folder))


def run(steps: int, figure: Path, folder: Path) -> int:
    """Make the four runs, with what they write in `folder`."""
    torch.set_num_threads(1)  # as each rank has: the number of threads changes how sums round
    print(_headline(steps), flush=True)
    text = corpus()
    unsplit = _timed("unsplit, a plain loop", lambda: train_unsplit(steps))
    reverse = _timed("the same, sums reversed", lambda: train_unsplit(steps, reverse=True))
    killed = _timed("2 replicas × 2 stages", lambda: train_until_killed(steps, folder))
    resumed = _timed("1 pipeline × 4 stages", lambda: resume(steps, folder))
    if not torch.equal(text, corpus()):
        raise RuntimeError("README or docs were edited meanwhile: the runs read different texts")
    curves = [
        Curve("the loop with sums reversed", reverse, "#8b949e", 1.0, is_drawn=False),
        Curve("2 replicas × 2 stages", killed, "#d2741f", end="killed"),
        Curve("4 stages, resumed", resumed, "#2f6fb7"),
    ]
    reference = Curve("unsplit, a plain loop", unsplit, "#c9ced4", 7.0)
    title = f"GPT-2 on the pages of pipecompile, bfloat16, {RANKS} gloo ranks"
    picture = loss_figure(title, reference, curves, tolerance=TOLERANCE, checkpoint=steps // 2)
    figure.write_text(picture)
    print(_table(unsplit, killed, resumed))
    distances = [distance(unsplit, curve.losses) for curve in curves]
    print(_verdict(*distances))
    print(f"\nwritten: {figure}")
    return 0 if max(distances[1:])[0] <= TOLERANCE else 1


def train_until_killed(steps: int, folder: Path) -> Losses:
    """Return the losses of two replicas of two stages, up to those before the kill."""
    done = torchrun(folder, 2, steps, "--kill", str(KILLED))
    if "Signal 9 (SIGKILL) received" not in done.stdout:
        raise RuntimeError(f"no rank was killed:\n{done.stdout}")
    return losses_of(folder, 2)


def resume(steps: int, folder: Path) -> Losses:
    """Return the losses of one pipeline of four stages, from the checkpoint to the end."""
    done = torchrun(folder, 4, steps, "--resume")
    if done.returncode:
        raise RuntimeError(f"the resumed run failed:\n{done.stdout}")
    return losses_of(folder, 4)


def torchrun(
    folder: Path, stages: int, steps: int, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `examples.pretrain` on all ranks to its end; what they say is in `stdout`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", "examples.pretrain"]
    command += ["--stages", str(stages), "--steps", str(steps), *options]
    command += ["--losses", str(folder / f"losses-{stages}")]
    command += ["--checkpoint", str(folder / "checkpoint")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses_of(folder: Path, stages: int) -> Losses:
    """Return what rank 0 has written."""
    lines = (folder / f"losses-{stages}").read_text().splitlines()
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


def distance(wanted: Losses, losses: Losses) -> tuple[float, int]:
    """Return the largest difference from the losses of the plain loop, and its step."""
    return max((abs(loss - wanted[step]), step) for step, loss in losses.items())


# -- what is printed


def _headline(steps: int) -> str:
    parameters = sum(parameter.numel() for parameter in gpt2().parameters())
    return (
        f"GPT-2, {LAYERS} layers of width {WIDTH}, {parameters:,} parameters, random weights\n"
        f"text: {len(corpus()):,} bytes of README and docs, one token a byte\n"
        f"{steps} steps of {BATCH} × {LENGTH} tokens in {MICROBATCHES} microbatches, bfloat16, "
        f"AdamW, norm clipped at {LARGEST_NORM}, warm-up and cosine\n"
    )


def _timed(name: str, train: Callable[[], Losses]) -> Losses:
    """Train, and print which steps that made and how long it took."""
    started = time.perf_counter()
    losses = train()
    steps, seconds = f"steps {min(losses)} to {max(losses)}", time.perf_counter() - started
    print(f"{name:24} {steps:18} {seconds:4.0f} s with start-up", flush=True)
    return losses


def _table(unsplit: Losses, killed: Losses, resumed: Losses) -> str:
    """Return losses at some steps; a run has none where it was not running."""
    last = max(unsplit)
    shown = sorted({0, *range(last // 8, last, max(last // 8, 1)), max(killed), min(resumed), last})
    rows = [
        f"{step:6} {unsplit[step]:10.4f} {_cell(killed, step)} {_cell(resumed, step)}"
        for step in shown
    ]
    return "\n".join(["", f"{'step':>6} {'unsplit':>10} {'2 × 2':>10} {'1 × 4':>10}", *rows])


def _cell(losses: Losses, step: int) -> str:
    return f"{losses[step]:10.4f}" if step in losses else " " * 10


def _verdict(
    reverse: tuple[float, int], killed: tuple[float, int], resumed: tuple[float, int]
) -> str:
    named = {"2 × 2": killed, "1 × 4, resumed": resumed, "the loop with sums reversed": reverse}
    lines = [
        f"  {name:28} {largest:.5f}  in step {step}" for name, (largest, step) in named.items()
    ]
    passed = max(killed, resumed)[0] <= TOLERANCE
    verdict = "equal" if passed else "NOT equal"
    return "\n".join(
        [
            "\nlargest difference from the losses of the plain loop",
            *lines,
            f"{verdict} within the tolerance of {TOLERANCE}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
