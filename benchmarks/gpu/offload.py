"""Saved tensors offloaded to the host on copy streams: what a stage keeps, and what it costs.

All that a stack of GPT blocks saves is offloaded, wherever the planner would offer it. A copy runs
beside the computation, so the extra time is what the nodes of a run do not hide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench, warm_up
from benchmarks.gpu.cases import Case
from benchmarks.gpu.models import HALF, Scale
from benchmarks.gpu.rows import Row
from benchmarks.gpu.subject import Subject, subject_of
from benchmarks.memory_models import Block
from pipecompile.codegen.regions import EncodedRuns
from pipecompile.cost_models.clock import Clock
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.plan import Plan
from pipecompile.ir.stage import EncodedNodes, Stage
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.stage import footprint_of
from pipecompile.recompute.encoding_offers import HOST_BYTES_PER_NS, encoding_offers
from pipecompile.runtime.stage import EagerStage, SavedForward

__all__ = ["blocks", "mean_square", "offload_cases"]

OFFLOAD: tuple[Encoding, ...] = ("offload",)
REPEATS = 5
COPY_BYTES = 1 << 28


def blocks(scale: Scale) -> dict[str, Any]:
    """Return a stack of GPT blocks in bfloat16, with attention in one kernel."""
    shape = scale.batch, scale.tokens, scale.width
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu")
    layers = (Block(scale.width, scale.heads) for _ in range(scale.layers))
    return {
        "model": nn.Sequential(*layers).to(HALF),
        "sample_input": states.to(HALF),
        "targets": torch.zeros(scale.batch, device="cpu"),
        "loss_fn": mean_square,
    }


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that needs no target."""
    return output.square().mean()


def offload_cases(bench: Bench) -> Iterator[Case]:
    """Yield the link to the host, then the stack with and without offload."""
    yield Case("copies", lambda: _copy_rows(bench))
    yield Case("GPT blocks", lambda: _stage_rows(bench))


def _copy_rows(bench: Bench) -> Iterator[Row]:
    """Yield the rate of copies between pinned memory and the device, which offload counts with."""
    if not bench.is_cuda:
        yield Row("copies to the host", None, None, "", note="needs CUDA")
        return
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=bench.device)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    for what, target, source in (("to", here, there), ("from", there, here)):

        def copy(target: Tensor = target, source: Tensor = source) -> None:
            target.copy_(source, non_blocking=True)

        rate = COPY_BYTES / _median_ns(bench, copy)
        yield Row(f"copies {what} the host", HOST_BYTES_PER_NS, rate, "GB/s", "assumed")


def _median_ns(bench: Bench, run: Callable[[], object]) -> float:
    """Return the median time of `run`, after one run to warm up."""
    clock, times = Clock(bench.device), []
    for repeat in range(1 + REPEATS):
        start = clock.mark()
        run()
        end = clock.mark()
        clock.wait()
        if repeat:
            times.append(clock.between_ns(start, end))
    return median(times)


class _Measured(NamedTuple):
    """What a stage keeps after a forward, and times: see `_direction_times`."""

    kept: int
    forward_ns: float
    computation_ns: float
    backward_ns: float


def _stage_rows(bench: Bench) -> Iterator[Row]:
    warm_up(bench.device)
    subject = subject_of(bench, blocks, microbatches=1)
    plan = subject.plan(k=1, schedule="gpipe")
    (stage,) = plan.stages
    ranges = LiveRanges(subject.graph)
    offers = encoding_offers(ranges, (), stage.nodes, OFFLOAD)
    runs = [offer.encoded for offer in offers]
    encoded = [(run.nodes, run.encodings) for run in runs]
    footprint = footprint_of(ranges, (), stage.nodes, (), encoded)
    plain = _measured(bench, subject, plan, {})
    offloaded = _measured(bench, subject, plan, {0: tuple(encoded)} if encoded else {})
    yield _kept("kept", stage.footprint.activations.expected, plain)
    yield _kept("kept, offloaded", footprint.activations.expected, offloaded)
    yield from _time_rows(stage, runs, plain, offloaded)


def _kept(what: str, expected: int, measured: _Measured) -> Row:
    return Row(what, expected, measured.kept, "bytes", "expected")


def _time_rows(
    stage: Stage, runs: Sequence[EncodedNodes], plain: _Measured, offloaded: _Measured
) -> Iterator[Row]:
    """Yield the times without offload, and what it adds to them."""
    forward, backward = sum(run.forward_ns for run in runs), sum(run.backward_ns for run in runs)
    hidden = (offloaded.computation_ns - plain.computation_ns) / 1e6
    note = f"{len(runs)} runs are offloaded"
    delay = f"{note}; without waiting for the copies {hidden:+.3f} ms"
    yield Row("forward", stage.forward_ns, plain.forward_ns, "ns", "plan")
    yield Row("backward", stage.backward_ns, plain.backward_ns, "ns", "plan")
    for what, predicted, extra, text in (
        ("forward", forward, offloaded.forward_ns - plain.forward_ns, delay),
        ("backward", backward, offloaded.backward_ns - plain.backward_ns, note),
    ):
        yield Row(f"extra {what}, offloaded", predicted, extra, "ns", "plan's extra", text)


def _measured(bench: Bench, subject: Subject, plan: Plan, runs: EncodedRuns) -> _Measured:
    (stage,) = subject.stages(plan, runs)
    (values,), (target,) = subject.inputs(), subject.targets()

    def forward() -> SavedForward:
        return stage.forward(values, StreamKey(0, 0, 0), target)[1]

    # The first one gets pinned memory for the copies, which takes long.
    times = [_direction_times(bench, stage, forward) for _ in range(1 + REPEATS)][1:]
    usage = bench.meter.usage(forward)
    for parameter in stage.module.parameters():
        parameter.grad = None
    return _Measured(usage.kept, *(median(column) for column in zip(*times, strict=True)))


def _direction_times(
    bench: Bench, stage: EagerStage, forward: Callable[[], SavedForward]
) -> tuple[int, int, int]:
    """Return the ns of a forward, of its computation alone, and of its backward.

    The forward ends when its copies to the host have arrived, as the plan counts it. Where other
    computation follows at once, only what lies between the marks delays that.
    """
    clock = Clock(bench.device)
    clock.wait()
    start, first = time.perf_counter_ns(), clock.mark()
    saved = forward()
    last = clock.mark()
    clock.wait()
    middle = time.perf_counter_ns()
    stage.backward(saved, (), {})
    clock.wait()
    return middle - start, clock.between_ns(first, last), time.perf_counter_ns() - middle
