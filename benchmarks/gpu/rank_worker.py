"""What each rank does for ranks.py, under torchrun: FILE and a scale are its arguments."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.models import Scale, gpt2, target_on
from benchmarks.gpu.rows import Row, described, needs_cuda
from pipecompile import Pipeline, pipecompile
from pipecompile.api.verification import verify
from pipecompile.frontend.target import Target
from pipecompile.runtime import world
from tests.device import DEVICE, prepare_rank

RANKS, MICROBATCHES = 2, 4
WARM_UPS, STEPS = 3, 4
SYNCHRONOUS: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "recompute": "stage"},
    {"schedule": "zb-v"},
)
OF_REPLICAS = SYNCHRONOUS[:1]
IN_FLIGHT = ("pipedream", "pipedream-2bw")


class Trace(NamedTuple):
    """What a profile saw: calls in which the host waited for the GPU, by name, and the streams of
    NCCL's kernels and of all others.
    """

    waits: dict[str, int]
    of_messages: set[int]
    of_computation: set[int]


def main(file: str, *sizes: str) -> None:
    """Write the rows of all cases on rank 0."""
    transformers.logging.set_verbosity_error()
    prepare_rank(int(os.environ["RANK"]))
    world.join()
    scale = Scale(*map(int, sizes))
    rows = []
    streams = _trace_rows(scale) if DEVICE.type == "cuda" else [needs_cuda("streams")]
    for row in chain(_gradient_rows(scale), streams):
        rows.append(row)
        if not world.rank():
            print(described(row), file=sys.stderr, flush=True)
    if not world.rank():
        Path(file).write_text(json.dumps(rows))


def _gradient_rows(scale: Scale) -> Iterator[Row]:
    """Yield how many tensors of a step are those of the unsplit model bit for bit."""
    for options in _settings():
        _, comparisons = verify(_target(scale), ranks=RANKS, microbatches=MICROBATCHES, **options)
        for comparison in comparisons:
            found = comparison.differences
            equal = sum(each.equal for each in found)
            passed = "passed" if comparison.passed else "DIFFERENT"
            note = f"{passed}; {len(comparison.tied)} are summed over ranks; {comparison.mode}"
            if equal < len(found):
                worst = comparison.worst
                note += f"; worst {worst.name}, {worst.relative:.1e}"
            yield Row(_name(options), len(found), equal, "tensors", "bit for bit", note)


def _trace_rows(scale: Scale) -> Iterator[Row]:
    """Yield what hosts wait for in steps, and on which streams messages are."""
    for options in (*_settings(), *({"schedule": name} for name in IN_FLIGHT)):
        target = _target(scale)
        pipeline = pipecompile(
            target.model,
            target.call,
            ranks=RANKS,
            loss_fn=target.loss_fn,
            sample_target=target.targets,
            costs="flops",
            self_check=False,
            **{"microbatches": MICROBATCHES, **_microbatches_of(options), **options},
        )
        step = _step_of(pipeline, target, str(options["schedule"]))
        for _ in range(WARM_UPS):
            step()
        trace = _traced(step)
        waits = world.gather(trace.waits)
        shared = world.gather(len(trace.of_messages & trace.of_computation))
        kernels = world.gather(len(trace.of_messages))
        note = ", ".join(f"{n} {name}" for each in waits for name, n in each.items()) or "none"
        most = max(sum(each.values()) for each in waits)
        what = _name(options)
        yield Row(f"{what}, waits of a host in {STEPS} steps", 0, most, "calls", "none", note)
        note = f"{min(kernels)} streams have messages"
        yield Row(f"{what}, streams with both", 0, max(shared), "streams", "none", note)


def _microbatches_of(options: dict[str, Any]) -> dict[str, int]:
    """Return the microbatches that a schedule demands."""
    return {"microbatches": 1} if options["schedule"] == "pipedream" else {}


def _step_of(pipeline: Pipeline, target: Target, schedule: str) -> Callable[[], object]:
    """Return what takes the next step; in flight that is the next minibatch of one run."""
    if schedule in IN_FLIGHT:
        losses = pipeline.train(
            repeat((target.call, target.targets)),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )
        return lambda: next(losses)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        pipeline.step(target.call, target.targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _traced(step: Callable[[], object]) -> Trace:
    """Return what a profile of some steps saw."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        with record_function("steps"):
            for _ in range(STEPS):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _trace_of(events)


def _trace_of(events: list[dict[str, Any]]) -> Trace:
    """Return the trace of the window that is called "steps"."""
    (window,) = [e for e in events if e.get("name") == "steps" and e["cat"] == "user_annotation"]
    start, end = window["ts"], window["ts"] + window["dur"]
    waits, of_messages, of_computation = Counter[str](), set[int](), set[int]()
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category == "kernel":
            streams = of_messages if "nccl" in name.lower() else of_computation
            streams.add(event["args"]["stream"])
        is_call = category in ("cuda_runtime", "cuda_driver") and start <= event["ts"] <= end
        if is_call and "Synchronize" in name:
            waits[name] += 1
    return Trace(dict(waits), of_messages, of_computation)


def _target(scale: Scale) -> Target:
    return target_on(DEVICE, gpt2, scale)


def _settings() -> tuple[dict[str, Any], ...]:
    """Return the options of the schedules that are run."""
    return SYNCHRONOUS if dist.get_world_size() == RANKS else OF_REPLICAS


def _name(options: dict[str, Any]) -> str:
    replicas = dist.get_world_size() // RANKS
    words = [str(options["schedule"]), *(["recomputed"] if "recompute" in options else [])]
    return ", ".join([*words, *([f"{replicas} replicas"] if replicas > 1 else [])])


if __name__ == "__main__":
    main(*sys.argv[1:])
