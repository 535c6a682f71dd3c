"""What workers do in tests of weights in flight where stages have several ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from pipecompile import RankFaultError
from tests.delayed_gradients import DelayedGradients
from tests.distributed.continuous_jobs import _loss_distance, _own_distance, from_the_beginning
from tests.distributed.stage_replica_jobs import replicated
from tests.distributed.training_jobs import MICROBATCH, mixture
from tests.training.test_continuous_training import batches_of


def trained(
    replicas: tuple[int, ...], schedule: str, microbatches: int, **options: Any
) -> dict[str, tuple[float, float, float, int]]:
    """How far losses and weights are from those of the recurrence, by optimizer, how far the
    weights are from those of plain synchronous steps, and how many copies of them the rank had at
    most.
    """
    run = replicated(replicas, microbatches, schedule=schedule)
    samples = MICROBATCH * microbatches
    batches = batches_of(samples)
    oracle = DelayedGradients(mixture(samples), run.pipeline.plan)
    found = {}
    for name, optimizer in from_the_beginning(run.pipeline, samples):
        training: Any = run.pipeline.train(iter(batches), optimizer, **options)
        own, losses, copies = training.weights.by_owner[run.pipeline._share.stages[0]], [], 0
        for loss in training:
            losses.append(loss)
            copies = max(copies, len(own.versions.live))
        plan = run.pipeline.plan
        wanted, state = oracle.train(plan, batches, optimizer, **options)
        _, steps = oracle.train(plan, batches, optimizer, schedule="1f1b")
        found[name] = (
            _loss_distance(losses, wanted),
            _own_distance(run.pipeline, state),
            _own_distance(run.pipeline, steps),
            copies,
        )
    return found


def failed_update(schedule: str) -> str:
    """What a rank says when the optimizer of rank 1 fails while rank 0 waits for its sums."""
    pipeline = replicated((2, 1), 2, schedule=schedule, step_timeout=20).pipeline
    steps = 0

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def failing(made: torch.optim.SGD, step: Any = torch.optim.SGD.step) -> None:
        nonlocal steps
        steps += 1
        if dist.get_rank() == 1 and steps == 3:
            raise ValueError("planted")
        step(made)

    with patch.object(torch.optim.SGD, "step", failing):
        try:
            list(pipeline.train(batches_of(MICROBATCH * 2), optimizer))
        except (RankFaultError, ValueError) as error:
            # Some rank may still be in the run: a barrier would wait for it for ever.
            dist.destroy_process_group()
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing"
