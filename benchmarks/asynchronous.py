"""How much faster is training that never empties the pipeline, and how long do its ranks idle?

    python -m benchmarks.asynchronous

Two and four gloo ranks train 50 minibatches under 1F1B and under the asynchronous schedules. This
is about schedules and messages, not about arithmetic: as if each rank had a device of its own, a
forward and a backward *wait* for a given time, which no other rank notices, and tensors are small.
So it can be measured on two cores. A plan with these times predicts how long each rank idles and
how many minibatches are trained in a second: for 1F1B by one step, for the others by all of the 50
minibatches from the empty pipeline to the empty one.

Prints a table; writes results/asynchronous.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from benchmarks.command_line import no_arguments
from benchmarks.weight_copies import sgd
from pipecompile import pipecompile
from pipecompile.api.comparison import comparison_of
from pipecompile.cost_models.protocol import FREE_CALL, CallCost, NodeCall
from pipecompile.training.pipeline import Pipeline
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "asynchronous.json"
RANKS, MICROBATCHES, MINIBATCHES, WARM_UP = (4, 2), 4, 50, 2
SCHEDULES = ("1f1b", "pipedream", "pipedream-vertical-sync", "pipedream-2bw")
FORWARD_NS, BACKWARD_NS = 50_000_000, 100_000_000
FEATURES = 8


class Wait(torch.autograd.Function):
    """The same values, after a time; so are the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Values of any shape to a copy of them."""
        time.sleep(FORWARD_NS / 1e9)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Gradients likewise."""
        time.sleep(BACKWARD_NS / 1e9)
        return gradients[0].clone()


class WaitingLayer(nn.Module):
    """A small layer that takes as long as a large one on a device elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, values: Tensor) -> Tensor:
        """Rows of features to such rows."""
        waited: Tensor = Wait.apply(self.linear(values))  # type: ignore[no-untyped-call]
        return waited


@dataclass(frozen=True)
class Rates:
    """What was predicted and measured of a schedule: minibatches in a second, and the share of the
    time in which each rank idles.
    """

    ranks: int
    schedule: str
    predicted_rate: float
    measured_rate: float
    predicted_idle: tuple[float, ...]
    measured_idle: tuple[float, ...]

    @property
    def idle_error(self) -> float:
        """By how much the idle share of a rank is off at most."""
        pairs = zip(self.predicted_idle, self.measured_idle, strict=True)
        return max(abs(one - other) for one, other in pairs)


def costs(node: fx.Node, call: NodeCall) -> CallCost:
    """The time of a node: only waiting takes any."""
    is_wait = call.operator.endswith("Wait.apply")
    return CallCost(FORWARD_NS, BACKWARD_NS, BACKWARD_NS, 0) if is_wait else FREE_CALL


def pipeline_of(schedule: str, ranks: int) -> Pipeline:
    """One waiting layer on each rank."""
    torch.manual_seed(0)
    batch = torch.randn(MICROBATCHES, FEATURES)
    return pipecompile(
        nn.Sequential(*(WaitingLayer() for _ in range(ranks))),
        batch,
        ranks=ranks,
        microbatches=MICROBATCHES,
        schedule=schedule,  # type: ignore[arg-type]
        loss_fn=nn.functional.mse_loss,
        sample_target=batch,
        costs=costs,
        pin={f"_{rank}_linear": rank for rank in range(ranks)},
        self_check=False,
    )


def measured(schedule: str) -> Rates | None:
    """Train on this rank; the first one returns what it found."""
    ranks = dist.get_world_size()
    pipeline = pipeline_of(schedule, ranks)
    batch = torch.randn(MICROBATCHES, FEATURES, generator=torch.Generator().manual_seed(1))

    def train(count: int) -> None:
        for _ in pipeline.train([(batch, batch)] * count, sgd):
            pass

    train(WARM_UP)
    with pipeline.record() as recorder:
        dist.barrier()
        start = time.perf_counter()
        train(MINIBATCHES)
        dist.barrier()
        seconds = time.perf_counter() - start
    if recorder.run is None:
        return None
    comparison = comparison_of(pipeline.plan, recorder.run)
    # In nanoseconds, although functions are taken to have a unit of their own.
    predicted_ns = comparison.predicted.makespan_ns / comparison.unit_ns
    shares = [rank.idle for rank in comparison.ranks]
    predicted_idle, measured_idle = zip(*shares, strict=True)
    return Rates(
        ranks,
        schedule,
        comparison.minibatches * 1e9 / predicted_ns,
        MINIBATCHES / seconds,
        predicted_idle,
        measured_idle,
    )


def main() -> None:
    """Measure all schedules, and write the result."""
    no_arguments(__doc__)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    workers = Workers(max(RANKS))
    print(_line(["ranks", "schedule", "minibatches/s", "gain over 1f1b", "idle", "worst rank"]))
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            flushed, *others = SCHEDULES
            reference = workers.run(ranks, measured, flushed, folder=folder)[0]
            rows.append(_row(reference, reference))
            for schedule in others:
                rates = workers.run(ranks, measured, schedule, folder=folder)[0]
                rows.append(_row(rates, reference))
    workers.close()
    result = {
        "forward_ms": FORWARD_NS / 1e6,
        "backward_ms": BACKWARD_NS / 1e6,
        "microbatches": MICROBATCHES,
        "minibatches": MINIBATCHES,
        "torch": torch.__version__,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _row(rates: Rates, flushed: Rates) -> dict[str, Any]:
    """Return what is known of a schedule, beside that of 1F1B, and print it."""
    pairs = {
        "minibatches_per_s": (rates.predicted_rate, rates.measured_rate),
        "gain": (
            rates.predicted_rate / flushed.predicted_rate - 1,
            rates.measured_rate / flushed.measured_rate - 1,
        ),
        "idle": (_mean(rates.predicted_idle), _mean(rates.measured_idle)),
    }
    rate, gain, idle = pairs.values()
    shown = [
        f"{rate[0]:.2f} → {rate[1]:.2f}",
        "" if rates is flushed else f"{gain[0]:+.1%} → {gain[1]:+.1%}",
        f"{idle[0]:.1%} → {idle[1]:.1%}",
        f"{100 * rates.idle_error:.1f} points",
    ]
    print(_line([str(rates.ranks), rates.schedule, *shown]), flush=True)
    return {
        "ranks": rates.ranks,
        "schedule": rates.schedule,
        **{name: {"predicted": pair[0], "measured": pair[1]} for name, pair in pairs.items()},
        "idle_by_rank": {"predicted": rates.predicted_idle, "measured": rates.measured_idle},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(cells: Sequence[str]) -> str:
    widths = (5, 23, 14, 18, 15, 10)
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


if __name__ == "__main__":
    main()
