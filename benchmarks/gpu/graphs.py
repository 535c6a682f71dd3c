"""A stage's forward and backward replayed as CUDA graphs, beside eager ones and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench, warm_up
from benchmarks.gpu.cases import Case
from benchmarks.gpu.offload import blocks
from benchmarks.gpu.rows import Row, needs_cuda
from benchmarks.gpu.subject import subject_of
from pipecompile.cost_models.clock import Clock

__all__ = ["differences", "graph_cases", "timed_gradients"]

REPEATS = 10
MICROBATCHES = 4


def graph_cases(bench: Bench) -> Iterator[Case]:
    """Yield a stack of blocks that computes much, and one whose kernels take no longer to run than
    to launch.
    """
    small = bench.scale._replace(width=min(256, bench.scale.width), batch=MICROBATCHES, tokens=64)
    for what, scale in (("GPT blocks", bench.scale), ("small GPT blocks", small)):
        yield Case(what, partial(_rows, replace(bench, scale=scale), what))


def _rows(bench: Bench, what: str) -> Iterator[Row]:
    if not bench.is_cuda:
        yield needs_cuda(what)
        return
    warm_up(bench.device)
    subject = subject_of(bench, blocks, microbatches=MICROBATCHES)
    plan = subject.plan(k=1, schedule="gpipe")
    module, values = subject.stages(plan)[0].module, subject.inputs()[0]
    eager_ns, eager = timed_gradients(bench, module, values)
    torch.cuda.make_graphed_callables(module, tuple(values))  # puts replays in place of its forward
    graph_ns, replayed = timed_gradients(bench, module, values)
    (stage,) = plan.stages
    predicted = stage.forward_ns + stage.backward_ns
    note = f"{differences(eager, replayed)} of {len(eager)} gradients differ from eager ones"
    yield Row(f"{what}, eager", predicted, eager_ns, "ns", "plan")
    yield Row(f"{what}, CUDA graphs", predicted, graph_ns, "ns", "plan", note)


def timed_gradients(
    bench: Bench, module: nn.Module, values: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    """Return the median ns of forward and backward of a module, and its parameters' gradients."""
    parameters = list(module.parameters())
    clock, times = Clock(bench.device), list[int]()
    for _ in range(1 + REPEATS):
        for parameter in parameters:
            parameter.grad = None
        clock.wait()
        start = clock.mark()
        outputs = module(*values)
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        output.backward(torch.ones_like(output))
        end = clock.mark()
        clock.wait()
        times.append(clock.between_ns(start, end))
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    return median(times[1:]), gradients


def differences(left: Sequence[Tensor], right: Sequence[Tensor]) -> int:
    """Return how many tensors of two lists of one length differ in any bit."""
    return sum(not torch.equal(*pair) for pair in zip(left, right, strict=True))
