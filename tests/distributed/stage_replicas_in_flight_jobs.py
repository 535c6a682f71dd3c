"""What workers do in tests of weights in flight where stages have several ranks."""

from __future__ import annotations

from typing import Any

from tests.delayed_gradients import DelayedGradients
from tests.distributed.continuous_jobs import _loss_distance, _own_distance, from_the_beginning
from tests.distributed.stage_replica_jobs import replicated
from tests.distributed.training_jobs import MICROBATCH, mixture
from tests.training.test_continuous_training import batches_of


def trained(
    replicas: tuple[int, ...], schedule: str, microbatches: int, **options: Any
) -> dict[str, tuple[float, float, float, int]]:
    """How far losses and weights are from those of the recurrence, by optimizer, how far the
    weights are from those of synchronous steps, and how many copies of them the rank had at most.
    """
    run = replicated(replicas, microbatches, schedule=schedule)
    samples = MICROBATCH * microbatches
    batches = batches_of(samples)
    oracle = DelayedGradients(mixture(samples), run.pipeline.plan)
    found = {}
    for name, optimizer in from_the_beginning(run.pipeline, samples):
        training: Any = run.pipeline.train(iter(batches), optimizer, **options)
        own, losses, copies = training.weights[run.pipeline._share.stages[0]], [], 0
        for loss in training:
            losses.append(loss)
            copies = max(copies, len(own.versions.live))
        plan = run.pipeline.plan
        wanted, state = oracle.train(plan, batches, optimizer, **options)
        _, steps = oracle.train(plan, batches, optimizer, schedule="1f1b", **options)
        found[name] = (
            _loss_distance(losses, wanted),
            _own_distance(run.pipeline, state),
            _own_distance(run.pipeline, steps),
            copies,
        )
    return found
