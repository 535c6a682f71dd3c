"""How many copies of its weights does a stage hold, counted by storage?

    python -m benchmarks.weight_copies

Chains of linear layers, one on each stage, are trained under every asynchronous schedule and under
1F1B. Each weight has a size that no other tensor has, so the allocator's own events tell how many
storages of that size live at once, gradients besides. Beside that stand what the papers say, of
stage s of n: n − s for PipeDream, n with vertical sync, 2 for PipeDream-2BW, and what the plan
counts in its memory.

Prints a table; writes results/weight_copies.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.command_line import no_arguments
from pipecompile import pipecompile
from pipecompile.training.pipeline import Pipeline
from tests.allocations import allocations, highest

RESULT = Path(__file__).parent / "results" / "weight_copies.json"
STAGES, MICROBATCHES, MINIBATCHES, TRIES = (2, 4, 8), 8, 6, 5
PUBLISHED: dict[str, Callable[[int, int], int]] = {
    "1f1b": lambda stage, stages: 1,
    "pipedream": lambda stage, stages: stages - stage,
    "pipedream-vertical-sync": lambda stage, stages: stages,
    "pipedream-2bw": lambda stage, stages: 2,
}


def chain_of(schedule: str, stages: int) -> Pipeline:
    """A linear layer on each stage, no two of them of one size."""
    torch.manual_seed(0)
    widths = [10 + 7 * index for index in range(stages + 1)]
    layers = [nn.Linear(*pair, bias=False) for pair in pairwise(widths)]
    return pipecompile(
        nn.Sequential(*layers),
        torch.zeros(MICROBATCHES, widths[0]),
        k=stages,
        microbatches=MICROBATCHES,
        schedule=schedule,  # type: ignore[arg-type]
        loss_fn=nn.functional.mse_loss,
        pin={f"_{stage}": stage for stage in range(stages)},
        costs="flops",
        self_check=False,
    )


def planned_copies(pipeline: Pipeline) -> list[int]:
    """The copies that the plan's memory has, by stage."""
    sizes = [parameter.nbytes for parameter in pipeline.parameters()]
    memory = pipeline.plan.prediction.memory
    return [rank.parameters.expected // size for rank, size in zip(memory, sizes, strict=True)]


def counted_copies(schedule: str, stages: int) -> list[int]:
    """The most storages of each weight that live at once in a run, by stage."""
    # The newest weight stays, and steps leave a gradient beside it. The profiler loses events on a
    # busy machine; then another number is left.
    left = 2 if schedule == "1f1b" else 1
    for _ in range(TRIES):
        changes = _changes(chain_of(schedule, stages))
        if all(sum(each) == left for each in changes):
            # A microbatch adds to the sum of its minibatch a gradient of the same size.
            gradients = 1 if schedule in ("pipedream", "pipedream-vertical-sync") else 2
            return [highest(each) - gradients for each in changes]
    raise RuntimeError(f"the profiler lost events {TRIES} times; run it on a machine at rest")


def _changes(pipeline: Pipeline) -> list[list[int]]:
    """Return for each weight the storages of its size that are made (1) and freed (-1), in order.

    What was there before the run is copied first, so that it is counted.
    """
    generator = torch.Generator().manual_seed(1)
    weights = list(pipeline.parameters())
    rows, wanted = (
        torch.randn(MINIBATCHES, MICROBATCHES, width, generator=generator)
        for width in (weights[0].shape[1], weights[-1].shape[0])
    )

    def run() -> None:
        for parameter in pipeline.parameters():
            parameter.data = parameter.data.clone()
        list(pipeline.train(zip(rows, wanted, strict=True), sgd))

    sizes = [weight.nbytes for weight in weights]
    assert len(set(sizes)) == len(sizes), "a size tells one weight from the others"
    events = allocations(run)
    return [[each // size for each in events if abs(each) == size] for size in sizes]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a stage, which keeps no state."""
    return torch.optim.SGD(parameters, lr=0.01)


def main() -> None:
    """Count under all schedules, and write the result."""
    no_arguments(__doc__)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'stages':6}  {'schedule':23}  {'published':17}  {'planned':17}  counted")
    for stages in STAGES:
        for schedule, published in PUBLISHED.items():
            row = {
                "published": [published(stage, stages) for stage in range(stages)],
                "planned": planned_copies(chain_of(schedule, stages)),
                "counted": counted_copies(schedule, stages),
            }
            texts = [f"{' '.join(map(str, copies)):17}" for copies in row.values()]
            print(f"{stages:<6}  {schedule:23}  {'  '.join(texts)}".rstrip(), flush=True)
            rows.append({"stages": stages, "schedule": schedule, **row})
    RESULT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
