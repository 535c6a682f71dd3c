"""What does a step take beside torch's own schedules, torch's engine, and a loop in one process?

    python -m benchmarks.runtime

Two gloo ranks train the same two stages, by turns with our runtime and with torch's ScheduleGPipe
and Schedule1F1B, whose loss and gradients are the same. One process trains them by turns with the
pipeline and with a loop over microbatches of the unsplit model. Under every synchronous schedule
two ranks train by turns with our loop over actions and with `engine="torch"`. Blocks of a few steps
alternate, so that a busy machine slows down both, and each finds its own weights in the caches as
in a training run; a ratio is the median over pairs of blocks, and the mean over rounds with new
processes, between which both sides exchange their weights.

Prints a table; writes results/runtime.json.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (  # noqa: TID251 (what ours is compared with)
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)

from benchmarks.command_line import no_arguments
from pipecompile import Pipeline, pipecompile
from pipecompile.schedule.named_orders import ASYNCHRONOUS, NAMES, required_placement
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "runtime.json"
MICROBATCHES = 4
ROUNDS, PAIRS, BLOCK = 6, 8, 5
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


Measured = tuple[float, float]
"""The milliseconds of our step, and the ratio of it to what it is beside."""


class Size(NamedTuple):
    """A model of equal layers, and the rows of a microbatch."""

    name: str
    width: int
    layers: int
    rows: int


SIZES = (
    Size("tiny", 64, 4, 8),
    Size("little", 128, 8, 64),
    Size("small", 256, 8, 64),
    Size("middle", 384, 8, 64),
    Size("medium", 512, 8, 64),
)
OF_ENGINES = SIZES[2]
SYNCHRONOUS = tuple(name for name in NAMES if name not in ASYNCHRONOUS | {"forward-only"})


def keep_memory() -> None:
    """Let this process keep what it frees, as the allocators of GPUs do.

    glibc gives large blocks back to the system, and zeroing their pages again takes up to 10 % of a
    step, on one side or the other.
    """
    libc = ctypes.CDLL(None)
    for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
        libc.mallopt(parameter, 1 << 30)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean square distance."""
    return (output - target).square().mean()


def layers_of(size: Size) -> nn.Sequential:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    parts = [(nn.Linear(size.width, size.width), nn.GELU()) for _ in range(size.layers)]
    return nn.Sequential(*[part for pair in parts for part in pair])


def batch_of(size: Size) -> Tensor:
    """One minibatch, the same in every process."""
    return torch.randn(
        MICROBATCHES * size.rows, size.width, generator=torch.Generator().manual_seed(0)
    )


def pipeline_of(schedule: str, model: nn.Module, batch: Tensor, **options: Any) -> Pipeline:
    """The pipeline over two ranks, of one stage on each where the schedule allows that."""
    shape, number = required_placement(schedule)
    return pipecompile(
        model,
        batch,
        ranks=2,
        stages_per_rank=number or (2 if shape == "loop" else 1),
        microbatches=MICROBATCHES,
        schedule=schedule,  # type: ignore[arg-type]
        loss_fn=loss_of,
        sample_target=batch,
        costs="flops",
        self_check=False,
        **options,
    )


def step_of(pipeline: Pipeline, batch: Tensor) -> Callable[[], None]:
    """A step that begins without gradients."""

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(batch, batch)

    return step


def ratios(one: Callable[[], Any], other: Callable[[], Any]) -> Measured:
    """The milliseconds of a step of the first, and the median ratio of it to the second."""
    times: list[tuple[float, float]] = []
    for index in range(PAIRS + 1):
        first, second = (one, other) if index % 2 else (other, one)
        a, b = _seconds(first), _seconds(second)
        times.append((a, b) if index % 2 else (b, a))
    times = times[1:]
    return 1e3 * median(a for a, _ in times), median(a / b for a, b in times)


def _seconds(step: Callable[[], Any]) -> float:
    """The seconds of a step, as the mean over a block after one that is not counted."""
    step()
    _meet()
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
        _meet()  # a step is over when its slowest rank is done
    return (time.perf_counter() - start) / BLOCK


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def beside_torch(size: Size, schedule: str, exchanged: bool) -> Measured:
    """Our step beside torch's, on this rank."""
    keep_memory()
    batch, rank = batch_of(size), dist.get_rank()
    both = [pipeline_of(schedule, layers_of(size), batch) for _ in range(2)]
    pipeline, other = reversed(both) if exchanged else both
    stage = PipelineStage(other.stages[0], rank, 2, torch.device("cpu"))
    # Stage modules return tuples.
    theirs = TORCH[schedule](
        stage, MICROBATCHES, loss_fn=lambda out, wanted: loss_of(out[0], wanted)
    )
    parameters = list(stage.submod.parameters())

    def torch_step() -> None:
        for parameter in parameters:
            parameter.grad = None
        if rank:
            theirs.step(target=batch, losses=[])
        else:
            theirs.step(batch)

    return ratios(step_of(pipeline, batch), torch_step)


def beside_engine(size: Size, schedule: str, exchanged: bool) -> Measured:
    """Our loop over actions beside torch's, on this rank."""
    keep_memory()
    batch, engines = batch_of(size), ["own", "torch"]
    pipelines = {
        engine: pipeline_of(schedule, layers_of(size), batch, engine=engine)
        for engine in (reversed(engines) if exchanged else engines)
    }
    own, theirs = (step_of(pipelines[engine], batch) for engine in engines)
    return ratios(own, theirs)


def beside_loop(size: Size, exchanged: bool) -> Measured:
    """A step in one process beside a loop over the microbatches of the unsplit model."""
    keep_memory()
    batch, both = batch_of(size), [layers_of(size), layers_of(size)]
    model, unsplit = reversed(both) if exchanged else both
    pipeline = pipeline_of("1f1b", model, batch)

    def loop() -> None:
        unsplit.zero_grad()
        for rows in batch.chunk(MICROBATCHES):
            (loss_of(unsplit(rows), rows) / MICROBATCHES).backward()

    return ratios(step_of(pipeline, batch), loop)


class Case(NamedTuple):
    """What is measured: `job` with these arguments, and with whether both sides exchange weights.

    A case of one rank runs in this process.
    """

    size: Size
    beside: str
    ranks: int
    job: Callable[..., Measured]
    arguments: tuple[Any, ...]


def cases() -> Iterator[Case]:
    """Yield all cases, in the order of the table."""
    for size in SIZES:
        for schedule, theirs in TORCH.items():
            yield Case(size, theirs.__name__, 2, beside_torch, (size, schedule))
        yield Case(size, "a loop in one process", 1, beside_loop, (size,))
    for schedule in SYNCHRONOUS:
        arguments = OF_ENGINES, schedule
        yield Case(OF_ENGINES, f"engine='torch', {schedule}", 2, beside_engine, arguments)


def main() -> None:
    """Measure all cases, and write the result."""
    no_arguments(__doc__)
    torch.set_num_threads(1)
    rounds = [measured_once(exchanged=bool(number % 2)) for number in range(ROUNDS)]
    print(f"{'model':8} {'beside':34} {'our step':>10} {'ratio':>15}")
    rows = [
        _row(case, found) for case, found in zip(cases(), zip(*rounds, strict=True), strict=True)
    ]
    RESULT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def measured_once(*, exchanged: bool) -> list[Measured]:
    """Measure each case once, with new processes: where weights lie in memory alone makes up to 5 %
    on a CPU, and a process keeps to its places.
    """
    workers, measured = Workers(2), []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            arguments = *case.arguments, exchanged
            if case.ranks == 1:
                measured.append(case.job(*arguments))
            else:
                measured.append(max(workers.run(2, case.job, *arguments, folder=folder)))
    workers.close()
    return measured


def _row(case: Case, measured: Sequence[Measured]) -> dict[str, Any]:
    step = mean(step for step, _ in measured)
    found = [ratio for _, ratio in measured]
    ratio, error = mean(found), stdev(found) / len(found) ** 0.5
    print(f"{case.size.name:8} {case.beside:34} {step:7.2f} ms {ratio:7.3f} ± {error:.3f}")
    return {
        "model": case.size.name,
        "beside": case.beside,
        "step_ms": round(step, 3),
        "ratio": ratio,
        "standard_error": error,
    }


if __name__ == "__main__":
    main()
