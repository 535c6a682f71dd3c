"""What workers do in the test of what a rank holds while minibatches are in flight."""

from __future__ import annotations

from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipecompile import pipecompile
from pipecompile.schedule.named_orders import held_microbatches
from tests.allocations import allocations, highest

WIDTH, ROWS, TRIALS = 192, 96, 9
MESSAGE = 4 * WIDTH * ROWS  # bytes
LOSSES = 1024  # bytes of the losses of a run, and more


def held_in_flight(schedule: str, microbatches: int, **shape: Any) -> tuple[int, int, int]:
    """The expected and the bound peak of this rank, and the measured one, without minibatches,
    which are there before.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    rows = torch.zeros(ROWS * microbatches, WIDTH)
    pipeline = pipecompile(
        nn.Sequential(*layers),
        rows,
        **shape,
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
        sample_target=rows,
        costs="flops",
        optimizer="sgd",
        self_check=False,
    )
    plan, rank = pipeline.plan, dist.get_rank()
    (stage,) = plan.footprints(rank).values()
    held = held_microbatches(schedule, plan.schedule.placement, microbatches)
    minibatches = held * stage.inputs.expected
    old = []

    def run() -> None:
        for parameter in pipeline.parameters():
            old.append(parameter.data)  # else it were freed, and the new one not counted
            parameter.data = parameter.data.clone()
        list(pipeline.train([(rows, rows)] * 8, lambda own: torch.optim.SGD(own, lr=0.01)))

    run()
    # The profiler loses events on a busy machine, and those of gloo's threads, which may be the
    # last to hold what ranks sum. A run that lost none leaves the newest weights.
    left, tries = sum(each.nbytes for each in pipeline.parameters()), range(TRIALS)
    runs = [each for each in (allocations(run) for _ in tries) if abs(sum(each) - left) < LOSSES]
    measured = median_low(map(highest, runs))
    total = plan.prediction.memory[rank].total
    return total.expected - minibatches, total.bound - minibatches, measured
