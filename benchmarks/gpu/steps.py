"""A step of four stages in one process, beside a loop over microbatches of the unsplit model.

Times are of the kernels that PyTorch chooses. Some of them add in an order that differs from run to
run, so gradients are compared with deterministic kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import nn

from benchmarks.gpu.bench import Bench, warm_up
from benchmarks.gpu.cases import Case
from benchmarks.gpu.graphs import differences
from benchmarks.gpu.models import MODELS, target_on
from benchmarks.gpu.rows import Row
from pipecompile.api.compilation import pipecompile
from pipecompile.cost_models.clock import Clock
from pipecompile.frontend.target import Target
from pipecompile.graph.model_state import copied_model

__all__ = ["step_cases"]

NAMES = ("llama", "vit")  # without dropout, so that the loop is of the module itself
STAGES = MICROBATCHES = 4
REPEATS = 10


def step_cases(bench: Bench) -> Iterator[Case]:
    """Yield a case for each model."""
    for name in NAMES:
        yield Case(name, partial(_rows, bench, name))


def _rows(bench: Bench, name: str) -> Iterator[Row]:
    # Read when cuBLAS begins; deterministic products ask for it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warm_up(bench.device)
    target = target_on(bench.device, MODELS[name], bench.scale)
    unsplit = copied_model(target.model)
    pipeline = pipecompile(
        target.model,
        target.call,
        k=STAGES,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        costs="flops",
    )

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(target.call, target.targets)

    loop = partial(_loop, target, unsplit)
    own_ns, loop_ns = _medians(bench, step, loop)
    note = f"{own_ns / 1e6:.1f} ms"
    yield Row(f"{name}, a step beside a loop", 1.0, own_ns / loop_ns, "times", "no longer", note)
    with _deterministic():
        step()
        loop()
    gradients = [
        [p.grad for p in model.parameters() if p.grad is not None] for model in (pipeline, unsplit)
    ]
    count = len(gradients[0])
    equal = count - differences(*gradients)
    yield Row(f"{name}, gradients, deterministic", count, equal, "tensors", "bit for bit")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use kernels whose results are the same in every run."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _loop(target: Target, model: nn.Module) -> None:
    """Leave the gradients of a step on the unsplit model."""
    model.zero_grad()
    calls, targets = target.microbatches(MICROBATCHES), target.cut_targets(MICROBATCHES)
    for call, wanted in zip(calls, targets, strict=True):
        loss = target.trained_by(model(*call.args, **call.kwargs), wanted)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= MICROBATCHES


def _medians(
    bench: Bench, one: Callable[[], object], other: Callable[[], object]
) -> tuple[float, float]:
    """Return the median ns of each of two runs, which take turns."""
    clock = Clock(bench.device)
    times: tuple[list[int], list[int]] = [], []
    for _ in range(2 + REPEATS):
        for index, run in enumerate((one, other)):
            clock.wait()
            start = clock.mark()
            run()
            end = clock.mark()
            clock.wait()
            times[index].append(clock.between_ns(start, end))
    return median(times[0][2:]), median(times[1][2:])
