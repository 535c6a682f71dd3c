"""Does each rank hold what the plan predicts? Expected and bound against the allocator's own events.

Every rank is a process with gloo and one thread. It runs two steps with the optimizer under torch.profiler, which
reports each allocation of torch's CPU allocator: receive buffers, optimizer state, activations, gradients, scratch of
kernels. The highest running sum, with the stage's parameters and buffers and its part of the minibatch, is what is
measured. Prints a table, names the worst case, writes benchmarks/results/memory_prediction.json.

    python -m benchmarks.memory_prediction [MODEL …]
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import CONVOLUTIONAL, MODELS
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import Target
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "memory_prediction.json"
SETTLING_SECONDS = 0.3


class Setting(NamedTuple):
    """A plan to make and run."""

    schedule: str
    k: int
    microbatches: int
    optimizer: str
    recompute: str = "none"
    memory: int | None = None  # bytes of each rank


SETTINGS = (
    Setting("gpipe", 2, 1, "adamw"),
    Setting("gpipe", 2, 2, "sgd"),
    Setting("1f1b", 2, 4, "momentum"),
    Setting("gpipe", 2, 8, "rmsprop"),
    Setting("1f1b", 4, 8, "adamw"),
    Setting("1f1b", 8, 8, "adafactor"),
    Setting("1f1b", 4, 4, "adam", "stage"),
    Setting("gpipe", 2, 1, "adamw", "block"),
    Setting("gpipe", 2, 4, "sgd", "block"),
    Setting("1f1b", 4, 8, "adam", "block"),
    Setting("gpipe", 2, 8, "sgd", "sqrt"),
    Setting("1f1b", 4, 4, "momentum", "sqrt"),
    Setting("zb-h1", 4, 8, "adamw"),
)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def measured_rank(name: str, setting: Setting) -> tuple[int, int, int]:
    """On one rank: bytes expected, bound and measured."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return measured(Target.of(MODELS[name](), name), setting)


def measured(target: Target, setting: Setting) -> tuple[int, int, int]:
    """The same of a model at hand."""
    pipeline = pipecompile(
        target.model,
        target.call,
        k=setting.k,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        recompute=setting.recompute,
        memory=setting.memory,
        optimizer=setting.optimizer,
        costs="flops",
        loss_fn=target.loss_fn,
        sample_target=target.targets,
    )
    assert bool(pipeline.plan.regions) == (setting.recompute in ("block", "sqrt", "auto")), "nothing is computed again"
    rank = torch.distributed.get_rank()
    memory = pipeline.plan.prediction.memory[rank].total
    return memory.expected, memory.bound, resident(pipeline, target, rank) + _highest(pipeline, target, setting)


def resident(pipeline: Pipeline, target: Target, rank: int) -> int:
    """What the rank holds before its first step: parameters, buffers, and the minibatch where it is read."""
    tensors = [*pipeline.parameters(), *(buffer for _, buffer in pipeline.named_buffers())]
    if rank == pipeline.plan.schedule.placement[0]:
        tensors += _leaves((target.call.args, target.call.kwargs))
    if rank == pipeline.plan.schedule.placement[-1]:
        tensors += _leaves(target.targets)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _highest(pipeline: Pipeline, target: Target, setting: Setting) -> int:
    """The highest sum of allocations during two steps, the first of which makes what stays."""
    optimizer = OPTIMIZERS[setting.optimizer](list(pipeline.parameters()))

    def steps() -> None:
        for _ in range(2):
            pipeline.step(target.call, target.targets)
            optimizer.step()
            optimizer.zero_grad()

    return highest(steps)


def highest(run: Callable[[], object]) -> int:
    """The highest sum of allocations of torch's CPU allocator during `run`."""
    gc.collect()  # what planning left is not let go meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.empty(1)  # a process's first profile may miss events
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)  # events at the very begin and end are dropped
        run()
        time.sleep(SETTLING_SECONDS)
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def main() -> None:
    """Prints and writes the table."""
    rows = list(_rows(sys.argv[1:] or list(MODELS)))
    for kind, names in (("transformers and MLPs", MODELS.keys() - set(CONVOLUTIONAL)), ("convnets", CONVOLUTIONAL)):
        for beyond in (False, True):
            chosen = [row for row in rows if row["model"] in names and _is_beyond(row) == beyond]
            _say_worst(kind + ", recompute and zero bubble" * beyond, chosen)
    if not sys.argv[1:]:
        RESULT.write_text(json.dumps({"torch": torch.__version__, "device": "cpu", "rows": rows}, indent=1) + "\n")


def _rows(names: list[str]) -> Iterator[dict[str, Any]]:
    header = ("model", "plan", "rank", "expected", "measured", "error", "bound", "above")
    print("{:9} {:40} {:>4} {:>11} {:>11} {:>7} {:>11} {:>6}".format(*header))
    workers = Workers(max(setting.k for setting in SETTINGS))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                for setting in SETTINGS:
                    yield from _measured(workers, name, setting, folder)
    finally:
        workers.close()


def _measured(workers: Workers, name: str, setting: Setting, folder: str) -> Iterator[dict[str, Any]]:
    label = f"{setting.schedule} k={setting.k} m={setting.microbatches} {setting.optimizer}"
    label += f" recompute {setting.recompute}" * (setting.recompute != "none")
    for rank, row in enumerate(workers.run(setting.k, measured_rank, name, setting, folder=folder)):
        expected, bound, measured = row
        error, above = expected / measured - 1, bound / measured - 1
        print(
            f"{name:9} {label:40} {rank:4} {expected:11,} {measured:11,} {error:+7.2%} {bound:11,} {above:+6.1%}",
            flush=True,
        )
        yield {
            "model": name, "plan": label, "rank": rank, "expected": expected, "measured": measured, "bound": bound,
        }  # fmt: skip


def _is_beyond(row: dict[str, Any]) -> bool:
    """Whether its plan recomputes or splits backwards: what these hold is known less exactly."""
    return "recompute" in row["plan"] or "zb-h1" in row["plan"]


def _say_worst(kind: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    worst = max(rows, key=lambda row: abs(row["expected"] / row["measured"] - 1))
    loosest = max(rows, key=lambda row: row["bound"] / row["measured"])
    broken = [row for row in rows if row["bound"] < row["measured"]]
    print(
        f"{kind}: {len(rows)} ranks; expected at worst {worst['expected'] / worst['measured'] - 1:+.2%} "
        f"({worst['model']}, {worst['plan']}, rank {worst['rank']}); bound at most "
        f"{loosest['bound'] / loosest['measured'] - 1:+.1%} ({loosest['model']}, {loosest['plan']}, rank "
        f"{loosest['rank']}), below what was measured on {len(broken)}"
    )


if __name__ == "__main__":
    main()
